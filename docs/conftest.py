"""What holds for the tests of the documentation: they are as patient as the integration tests."""

from integration_tests.patience import be_patient

be_patient()
