// As much of the Objective-C runtime as metal-cpp names; the test double defines it. For checks away from a Mac.
#pragma once

#include <objc/runtime.h>

extern "C" {
void objc_msgSend(void);
void objc_msgSend_stret(void);
void objc_msgSend_fpret(void);
}
