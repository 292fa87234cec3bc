"""The device lane, DALI, CuPy, copies to devices and their memory: all that imports CUDA."""
