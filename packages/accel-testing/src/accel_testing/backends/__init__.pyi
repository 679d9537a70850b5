from accel_testing.backends.reference_loop import Case as Case
from accel_testing.backends.reference_loop import FakeStrategy as FakeStrategy
from accel_testing.backends.reference_loop import Training as Training
from accel_testing.backends.reference_loop import loss_of as loss_of
from accel_testing.backends.reference_loop import make_optimizer as make_optimizer
from accel_testing.backends.suite import BackendSuite as BackendSuite
