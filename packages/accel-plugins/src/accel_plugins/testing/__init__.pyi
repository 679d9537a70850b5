from accel_plugins.testing.backend_suite import BackendSuite as BackendSuite
from accel_plugins.testing.reference_loop import Case as Case
from accel_plugins.testing.reference_loop import FakeStrategy as FakeStrategy
from accel_plugins.testing.reference_loop import Session as Session
from accel_state.testing.fresh import fresh as fresh
from accel_state.testing.processes import Processes as Processes
from accel_state.testing.processes import run_command as run_command
