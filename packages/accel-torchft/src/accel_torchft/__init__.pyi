from accel_torchft.config import TorchFTConfig as TorchFTConfig
