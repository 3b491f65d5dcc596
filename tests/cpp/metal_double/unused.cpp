// What metal-cpp's definitions refer to and nothing of ours calls.
#include <cstdlib>

#include "tests/cpp/metal_double/objects.h"

extern "C" {

flexpte::metal_double::Object* MTLCopyAllDevices() {
  std::abort();
}
flexpte::metal_double::Object* MTLCopyAllDevicesWithObserver(void*, void*) {
  std::abort();
}
void MTLRemoveDeviceObserver(const void*) {
  std::abort();
}

// The runtime of blocks.
void* _NSConcreteStackBlock[32];
void _Block_object_assign(void*, const void*, int) {
  std::abort();
}
void _Block_object_dispose(const void*, int) {
  std::abort();
}
}
