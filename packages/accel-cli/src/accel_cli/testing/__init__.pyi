from accel_cli.testing.launcher_suite import LauncherSuite as LauncherSuite
from accel_cli.testing.launcher_suite import make_plan as make_plan
from accel_cli.testing.launcher_suite import prepare_launch as prepare_launch
