// The one file that defines metal-cpp's tables of classes and selectors.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include "metal_delegate/metal/metal_cpp.h"
