// As much of CoreGraphics as metal-cpp names. For checks away from a Mac; never used on one.
#pragma once

typedef struct CGColorSpace* CGColorSpaceRef;
