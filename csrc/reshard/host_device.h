// Functions that run on the host and, where a CUDA compiler reads them, on the device. On the host
// they are never emitted on their own: files built for other processors share these headers.
#ifndef ASYNCRL_RESHARD_HOST_DEVICE_H_
#define ASYNCRL_RESHARD_HOST_DEVICE_H_

#ifdef __CUDACC__
#define ASYNCRL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ASYNCRL_HOST_DEVICE [[gnu::always_inline]] inline
#endif

#endif  // ASYNCRL_RESHARD_HOST_DEVICE_H_
