// As much of the Objective-C runtime as metal-cpp names; the test double defines it. For checks away from a Mac.
#pragma once

struct objc_selector;
struct objc_class;
struct objc_object {
  objc_class* isa;
};
typedef objc_selector* SEL;
typedef objc_class* Class;
typedef objc_object* id;
typedef objc_object Protocol;

extern "C" {
SEL sel_registerName(const char* name);
Class objc_lookUpClass(const char* name);
Protocol* objc_getProtocol(const char* name);
}
