// As much of CoreFoundation as metal-cpp names. For checks away from a Mac; never used on one.
#pragma once

#include <math.h>

typedef double CFTimeInterval;
typedef const struct __CFString* CFStringRef;

extern "C" CFStringRef __CFStringMakeConstantString(const char* text);
