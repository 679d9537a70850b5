from accel_check.in_tests import parity as parity
from accel_check.in_tests import resume as resume
