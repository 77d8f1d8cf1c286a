// The CUDA executor, compiled as C++.
#define ASYNCRL_EMULATE_CUDA
#include "reshard/kernels.cu"
