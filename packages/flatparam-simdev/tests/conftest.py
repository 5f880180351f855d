"""What every test of this package shares: worlds that are patient with a busy machine."""

from flatparam_comm.testing import be_patient

be_patient()
