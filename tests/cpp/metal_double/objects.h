// The objects of the double, and how messages reach them.
#pragma once

#include <objc/runtime.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/cpp/metal_double/metal_double.h"

namespace flexpte::metal_double {

using Method = void (*)();
class Object;

// A class: the methods that its objects and it itself answer. Its instances are C++ objects.
class ClassInfo {
 public:
  // `parent` is null for NSObject.
  ClassInfo(const char* name, const ClassInfo* parent) : name_(name), parent_(parent) {}

  template <class Function>
  ClassInfo& method(const char* selector, Function function) {
    methods_[sel_registerName(selector)] = reinterpret_cast<Method>(+function);
    return *this;
  }
  template <class Function>
  ClassInfo& class_method(const char* selector, Function function) {
    class_methods_[sel_registerName(selector)] = reinterpret_cast<Method>(+function);
    return *this;
  }

  const char* name() const { return name_; }
  Method find(SEL selector, bool is_class_method) const;

 private:
  const char* name_;
  const ClassInfo* parent_;
  std::unordered_map<SEL, Method> methods_;
  std::unordered_map<SEL, Method> class_methods_;
};

const ClassInfo& ns_object();

// Of every object. Born with one reference, which belongs to its maker.
class Object {
 public:
  explicit Object(const ClassInfo& info);
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  const ClassInfo& info() const { return info_; }
  void retain() { ++references_; }
  void release();
  long references() const { return references_; }

 private:
  // Gives up what it holds; the shell stays for a while, so that messages to it are noticed.
  virtual void dealloc() {}

  const ClassInfo& info_;
  std::atomic<long> references_ = 1;
};

// An owned reference.
template <class T>
class Ref {
 public:
  Ref() = default;
  static Ref adopt(T* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  static Ref retain(T* object) {
    if (object != nullptr) object->retain();
    return adopt(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { reset(); }
  void reset() {
    if (T* object = std::exchange(object_, nullptr)) object->release();
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
};

// Leaves the reference to the current pool.
void autorelease(Object* object);
template <class T>
T* autoreleased(Ref<T> ref) {
  T* object = ref.get();
  if (object != nullptr) {
    object->retain();
    autorelease(object);
  }
  return object;
}

// Counts one more of something that was asked for.
void count(size_t Record::*counter);
// Whether something is to be refused once more.
bool use_up(int Behaviour::*refusals);
// The error that the next one is to fail with; empty for none.
std::string take(std::string Behaviour::*error);
int64_t take_command_buffer_error();

void record_kernel(std::string_view name);
void violation(std::string text);
// The first violation that no command buffer has reported; empty when there is none.
std::string take_violation();

// NSString.
class String final : public Object {
 public:
  explicit String(std::string text);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// NSError.
class Error final : public Object {
 public:
  Error(int64_t code, std::string description);
  int64_t code() const { return code_; }
  const std::string& description() const { return description_; }

 private:
  int64_t code_;
  std::string description_;
};
void set_error(Error** error, int64_t code, std::string description);

// NSArray of strings.
Object* string_array(const std::vector<std::string>& strings);

// Classes by name, for objc_lookUpClass; null for those that the double lacks.
Object* class_object(std::string_view name);
const std::unordered_map<std::string_view, const ClassInfo*>& foundation_classes();
const std::unordered_map<std::string_view, const ClassInfo*>& metal_classes();

}  // namespace flexpte::metal_double
