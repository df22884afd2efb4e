// A CPU build of torch has no device guard for CUDA, which operators on CUDA tensors ask for, also on those without memory. This one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using NoGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard)
}
