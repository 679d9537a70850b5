from accel_cli.testing.launcher_suite import LauncherSuite as LauncherSuite
from accel_cli.testing.plans import make_plan as make_plan
from accel_cli.testing.plans import prepare_launch as prepare_launch
