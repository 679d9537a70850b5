from accel_plugins.precision.base import Precision as Precision
from accel_plugins.precision.config import AutocastKwargs as AutocastKwargs
from accel_plugins.precision.config import GradScalerKwargs as GradScalerKwargs
from accel_plugins.precision.native import BFloat16 as BFloat16
from accel_plugins.precision.native import Float16 as Float16
from accel_plugins.precision.select import choose as choose
