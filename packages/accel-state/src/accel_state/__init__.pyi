from accel_state.choices import ComputeEnvironment as ComputeEnvironment
from accel_state.choices import CustomDtype as CustomDtype
from accel_state.choices import DynamoBackend as DynamoBackend
from accel_state.choices import SageMakerDistributedType as SageMakerDistributedType
from accel_state.console import tqdm as tqdm
from accel_state.errors import AccelError as AccelError
from accel_state.gradient import GradientAccumulationPlugin as GradientAccumulationPlugin
from accel_state.gradient import GradientState as GradientState
from accel_state.kwargs import InitProcessGroupKwargs as InitProcessGroupKwargs
from accel_state.kwargs import KwargsHandler as KwargsHandler
from accel_state.labels import DistributedType as DistributedType
from accel_state.labels import PrecisionType as PrecisionType
from accel_state.labels import RNGType as RNGType
from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
from accel_state.logging import get_logger as get_logger
from accel_state.memory import clear_device_cache as clear_device_cache
from accel_state.memory import release_memory as release_memory
from accel_state.mesh import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from accel_state.mesh import ParallelismConfig as ParallelismConfig
from accel_state.mesh import TorchContextParallelConfig as TorchContextParallelConfig
from accel_state.mesh import TorchTensorParallelConfig as TorchTensorParallelConfig
from accel_state.process import PartialState as PartialState
from accel_state.run_state import AcceleratorState as AcceleratorState
from accel_state.watch.calls import Call as Call

__version__: str
