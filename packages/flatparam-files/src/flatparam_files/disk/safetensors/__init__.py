"""The safetensors format: the header, and the stream of the tensors behind it."""

from flatparam_files.disk.safetensors.header import DTYPES, SafetensorsHeader, StoredTensor, read_header
from flatparam_files.disk.safetensors.stream import Staging, TensorFileWriter

__all__ = ["DTYPES", "SafetensorsHeader", "Staging", "StoredTensor", "TensorFileWriter", "read_header"]
