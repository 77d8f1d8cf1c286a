// The Python extension `asyncrl._C`: one register function per area, declared here and nowhere
// else.
#include <pybind11/pybind11.h>

namespace asyncrl {

void register_ring(pybind11::module_& module);
void register_reshard(pybind11::module_& module);

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of asyncrl: the sample ring and the reshard executors.";
  register_ring(module);
  register_reshard(module);
#ifdef ASYNCRL_WITH_CUDA
  module.attr("with_cuda") = true;
#else
  module.attr("with_cuda") = false;
#endif
}

}  // namespace asyncrl
