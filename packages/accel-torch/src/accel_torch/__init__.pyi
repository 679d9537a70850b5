from accel_bigmodel import *  # noqa: F403
from accel_data import *  # noqa: F403
from accel_ops import *  # noqa: F403
from accel_plugins import *  # noqa: F403
from accel_state import *  # noqa: F403
from accel_state.errors import BadStep as BadStep
from accel_state.errors import NonFiniteStep as NonFiniteStep
from accel_state.errors import ReplicasDiffer as ReplicasDiffer
from accel_state.errors import SpikeStep as SpikeStep
from accel_torch.accelerator import Accelerator as Accelerator
from accel_torch.local_sgd import LocalSGD as LocalSGD
from accel_torch.micro_batches import MicroBatches as MicroBatches
from accel_torch.micro_batches import find_micro_batch_size as find_micro_batch_size
from accel_torch.misuse import MisuseWarning as MisuseWarning
from accel_torch.model_average import ModelAverage as ModelAverage
from accel_torch.profile import ProfileKwargs as ProfileKwargs
from accel_torch.profile import ProfilerActivity as ProfilerActivity
from accel_torch.step_guard.config import StepGuard as StepGuard
from accel_torch.whole_matrices import WholeMatrices as WholeMatrices
from accel_tracking import *  # noqa: F403

__version__: str
