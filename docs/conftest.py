"""What holds for the tests of the documentation: they are as patient as the integration tests."""

from flatparam_comm.testing import be_patient

be_patient()
