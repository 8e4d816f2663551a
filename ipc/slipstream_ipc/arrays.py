"""Names of numpy's arrays by the type of their entries; shapes stand where they are declared."""

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
