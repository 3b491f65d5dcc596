#include "tests/cpp/metal_double/objects.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "tests/cpp/metal_double/metal_double.h"

struct objc_selector {
  std::string name;
};

namespace flexpte::metal_double {
namespace {

// Objects that were released to the end, kept so that messages to them are noticed.
constexpr size_t kMaxDead = 4096;

// Used while other translation units are still being initialised, and after they are gone.
struct World {
  std::recursive_mutex mutex;
  std::map<std::string, std::unique_ptr<objc_selector>, std::less<>> selectors;
  std::map<std::string, std::unique_ptr<Object>, std::less<>> classes;
  std::set<const Object*> live;
  std::set<const Object*> dead;
  std::deque<Object*> dead_in_order;
  std::vector<std::string> unreported;
  Behaviour behaviour;
  Record record;
};

World& world() {
  static World* const world = new World;
  return *world;
}

// A class as something that messages can be sent to.
class ClassObject final : public Object {
 public:
  explicit ClassObject(const ClassInfo& info) : Object(info) {}
};

struct Pool;
thread_local std::vector<Pool*> pools;

// NSAutoreleasePool: as on Apple's systems, pools nest by thread.
struct Pool final : Object {
  Pool();
  void dealloc() override {
    if (pools.empty() || pools.back() != this) {
      violation("an autorelease pool was released while it was not the innermost one");
    }
    std::erase(pools, this);
    for (Object* object : objects) object->release();
    objects.clear();
  }
  std::vector<Object*> objects;
};

const ClassInfo& pool_class() {
  static const ClassInfo info = [] {
    ClassInfo c("NSAutoreleasePool", &ns_object());
    c.class_method("alloc", [](Object*, SEL) -> Object* { return new Pool; });
    c.method("init", [](Pool* self, SEL) -> Object* {
      pools.push_back(self);
      return self;
    });
    c.method("drain", [](Pool* self, SEL) { self->release(); });
    return c;
  }();
  return info;
}

Pool::Pool() : Object(pool_class()) {}

}  // namespace

Behaviour& behaviour() {
  return world().behaviour;
}
Record& record() {
  return world().record;
}

void reset() {
  const std::lock_guard lock(world().mutex);
  world().behaviour = {};
  world().record = {};
  world().unreported.clear();
}

std::vector<std::string> live_objects() {
  const std::lock_guard lock(world().mutex);
  std::vector<std::string> names;
  for (const Object* object : world().live) names.emplace_back(object->info().name());
  std::sort(names.begin(), names.end());
  return names;
}

void count(size_t Record::*counter) {
  const std::lock_guard lock(world().mutex);
  ++(world().record.*counter);
}

bool use_up(int Behaviour::*refusals) {
  const std::lock_guard lock(world().mutex);
  int& left = world().behaviour.*refusals;
  return left > 0 && left-- > 0;
}

std::string take(std::string Behaviour::*error) {
  const std::lock_guard lock(world().mutex);
  return std::exchange(world().behaviour.*error, {});
}

int64_t take_command_buffer_error() {
  const std::lock_guard lock(world().mutex);
  std::vector<int64_t>& errors = world().behaviour.command_buffer_errors;
  if (errors.empty()) return 0;
  const int64_t code = errors.front();
  errors.erase(errors.begin());
  return code;
}

void record_kernel(std::string_view name) {
  const std::lock_guard lock(world().mutex);
  world().record.kernels.emplace_back(name);
}

void violation(std::string text) {
  const std::lock_guard lock(world().mutex);
  std::fprintf(stderr, "Metal double: %s\n", text.c_str());
  world().record.violations.push_back(text);
  world().unreported.push_back(std::move(text));
}

std::string take_violation() {
  const std::lock_guard lock(world().mutex);
  std::string text = world().unreported.empty() ? std::string() : world().unreported.front();
  world().unreported.clear();
  return text;
}

Method ClassInfo::find(SEL selector, bool is_class_method) const {
  for (const ClassInfo* info = this; info != nullptr; info = info->parent_) {
    const auto& methods = is_class_method ? info->class_methods_ : info->methods_;
    if (const auto found = methods.find(selector); found != methods.end()) return found->second;
  }
  return nullptr;
}

Object::Object(const ClassInfo& info) : info_(info) {
  const std::lock_guard lock(world().mutex);
  world().live.insert(this);
}

void Object::release() {
  if (--references_ > 0) return;
  dealloc();
  World& w = world();
  const std::lock_guard lock(w.mutex);
  w.live.erase(this);
  w.dead.insert(this);
  w.dead_in_order.push_back(this);
  if (w.dead_in_order.size() > kMaxDead) {
    w.dead.erase(w.dead_in_order.front());
    delete w.dead_in_order.front();
    w.dead_in_order.pop_front();
  }
}

const ClassInfo& ns_object() {
  static const ClassInfo info = [] {
    ClassInfo c("NSObject", nullptr);
    c.method("retain", [](Object* self, SEL) -> Object* {
      self->retain();
      return self;
    });
    c.method("release", [](Object* self, SEL) { self->release(); });
    c.method("autorelease", [](Object* self, SEL) -> Object* {
      autorelease(self);
      return self;
    });
    c.method("retainCount", [](Object* self, SEL) { return static_cast<uint64_t>(self->references()); });
    c.method("respondsToSelector:",
             [](Object* self, SEL, SEL selector) { return self->info().find(selector, false) != nullptr; });
    return c;
  }();
  return info;
}

void autorelease(Object* object) {
  if (pools.empty()) {
    violation(std::string("an object of class ") + object->info().name() +
              " was autoreleased without a pool: it leaks");
    return;
  }
  pools.back()->objects.push_back(object);
}

Object* class_object(std::string_view name) {
  const ClassInfo* info = nullptr;
  if (name == "NSAutoreleasePool") info = &pool_class();
  for (const auto* classes : {&foundation_classes(), &metal_classes()}) {
    if (const auto found = classes->find(name); found != classes->end()) info = found->second;
  }
  if (info == nullptr) return nullptr;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  std::unique_ptr<Object>& object = w.classes[std::string(name)];
  if (object == nullptr) {
    object = std::make_unique<ClassObject>(*info);
    w.live.erase(object.get());
  }
  return object.get();
}

extern "C" void metal_double_return_nothing();

// Called by objc_msgSend below.
extern "C" Method metal_double_resolve(Object* object, SEL selector) {
  if (object == nullptr) return metal_double_return_nothing;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const bool is_live = w.live.contains(object);
  if (!is_live && w.dead.contains(object)) {
    violation(std::string("message ") + selector->name + " to an object of class " + object->info().name() +
              " that was released to the end");
    return metal_double_return_nothing;
  }
  // What is neither is a class.
  if (const Method method = object->info().find(selector, !is_live)) return method;
  std::fprintf(stderr, "Metal double: class %s has no method %s\n", object->info().name(), selector->name.c_str());
  std::abort();
}

}  // namespace flexpte::metal_double

using flexpte::metal_double::world;

extern "C" SEL sel_registerName(const char* name) {
  const std::lock_guard lock(world().mutex);
  auto& selector = world().selectors[name];
  if (selector == nullptr) selector.reset(new objc_selector{name});
  return selector.get();
}

extern "C" Class objc_lookUpClass(const char* name) {
  return reinterpret_cast<Class>(flexpte::metal_double::class_object(name));
}

extern "C" Protocol* objc_getProtocol(const char*) {
  return nullptr;
}

// objc_msgSend(object, selector, ...) finds the method and jumps to it, with all arguments where they were.
#if defined(__x86_64__)
#define METAL_DOUBLE_SEND(name, object, selector)                                                                \
  ".globl " name "\n.hidden " name "\n.type " name ", @function\n" name                                          \
  ":\n"                                                                                                          \
  "  pushq %rbp\n  movq %rsp, %rbp\n  subq $192, %rsp\n"                                                         \
  "  movq %rdi, 0(%rsp)\n  movq %rsi, 8(%rsp)\n  movq %rdx, 16(%rsp)\n  movq %rcx, 24(%rsp)\n"                   \
  "  movq %r8, 32(%rsp)\n  movq %r9, 40(%rsp)\n  movq %rax, 48(%rsp)\n"                                          \
  "  movaps %xmm0, 64(%rsp)\n  movaps %xmm1, 80(%rsp)\n  movaps %xmm2, 96(%rsp)\n  movaps %xmm3, 112(%rsp)\n"    \
  "  movaps %xmm4, 128(%rsp)\n  movaps %xmm5, 144(%rsp)\n  movaps %xmm6, 160(%rsp)\n  movaps %xmm7, 176(%rsp)\n" \
  "  movq " object ", %rdi\n  movq " selector                                                                    \
  ", %rsi\n  call metal_double_resolve\n  movq %rax, %r11\n"                                                     \
  "  movaps 64(%rsp), %xmm0\n  movaps 80(%rsp), %xmm1\n  movaps 96(%rsp), %xmm2\n  movaps 112(%rsp), %xmm3\n"    \
  "  movaps 128(%rsp), %xmm4\n  movaps 144(%rsp), %xmm5\n  movaps 160(%rsp), %xmm6\n  movaps 176(%rsp), %xmm7\n" \
  "  movq 0(%rsp), %rdi\n  movq 8(%rsp), %rsi\n  movq 16(%rsp), %rdx\n  movq 24(%rsp), %rcx\n"                   \
  "  movq 32(%rsp), %r8\n  movq 40(%rsp), %r9\n  movq 48(%rsp), %rax\n"                                          \
  "  leave\n  jmpq *%r11\n.size " name ", .-" name "\n"

asm(".text\n" METAL_DOUBLE_SEND("objc_msgSend", "0(%rsp)", "8(%rsp)")
        METAL_DOUBLE_SEND("objc_msgSend_fpret", "0(%rsp)", "8(%rsp)")
        // The first argument is where the result goes.
        METAL_DOUBLE_SEND("objc_msgSend_stret", "8(%rsp)", "16(%rsp)")
    ".globl metal_double_return_nothing\n.hidden metal_double_return_nothing\n"
    "metal_double_return_nothing:\n  xorl %eax, %eax\n  xorl %edx, %edx\n  pxor %xmm0, %xmm0\n  ret\n");
#elif defined(__aarch64__)
asm(".text\n"
    ".globl objc_msgSend\n.hidden objc_msgSend\n"
    "objc_msgSend:\n"
    "  stp x29, x30, [sp, #-224]!\n  mov x29, sp\n"
    "  stp x0, x1, [sp, #16]\n  stp x2, x3, [sp, #32]\n  stp x4, x5, [sp, #48]\n  stp x6, x7, [sp, #64]\n"
    "  str x8, [sp, #80]\n"
    "  stp q0, q1, [sp, #96]\n  stp q2, q3, [sp, #128]\n  stp q4, q5, [sp, #160]\n  stp q6, q7, [sp, #192]\n"
    "  bl metal_double_resolve\n  mov x16, x0\n"
    "  ldp q0, q1, [sp, #96]\n  ldp q2, q3, [sp, #128]\n  ldp q4, q5, [sp, #160]\n  ldp q6, q7, [sp, #192]\n"
    "  ldr x8, [sp, #80]\n"
    "  ldp x0, x1, [sp, #16]\n  ldp x2, x3, [sp, #32]\n  ldp x4, x5, [sp, #48]\n  ldp x6, x7, [sp, #64]\n"
    "  ldp x29, x30, [sp], #224\n  br x16\n"
    ".globl metal_double_return_nothing\n.hidden metal_double_return_nothing\n"
    "metal_double_return_nothing:\n  mov x0, #0\n  mov x1, #0\n  movi v0.2d, #0\n  ret\n");
#else
#error "the Metal double knows x86-64 and arm64"
#endif
