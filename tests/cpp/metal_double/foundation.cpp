// The few classes of Foundation that Metal's calls take and give.
#include <cstring>
#include <vector>

#include "tests/cpp/metal_double/metal_double.h"
#include "tests/cpp/metal_double/objects.h"

namespace flexpte::metal_double {
namespace {

struct Array final : Object {
  explicit Array(std::vector<Ref<Object>> items);
  void dealloc() override { objects.clear(); }
  std::vector<Ref<Object>> objects;
};

// NSOperatingSystemVersion.
struct SystemVersion {
  int64_t major, minor, patch;
};

constexpr uint64_t kUtf8 = 4;

bool is_utf8(std::string_view text) {
  size_t num_following = 0;
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    const bool is_following = (byte & 0xC0) == 0x80;
    if (is_following != (num_following > 0)) return false;
    if (is_following) {
      --num_following;
    } else if (byte >= 0xC2) {
      num_following = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
      if (byte > 0xF4) return false;
    } else if (byte >= 0x80) {
      return false;
    }
  }
  return num_following == 0;
}

const ClassInfo& string_class() {
  static const ClassInfo info = [] {
    ClassInfo c("NSString", &ns_object());
    c.class_method("stringWithCString:encoding:", [](Object*, SEL, const char* text, uint64_t encoding) -> Object* {
      if (encoding != kUtf8) violation("NSString of an encoding other than UTF-8");
      return is_utf8(text) ? autoreleased(Ref<String>::adopt(new String(text))) : nullptr;
    });
    c.method("UTF8String", [](String* self, SEL) { return self->text().c_str(); });
    c.method("length", [](String* self, SEL) { return static_cast<uint64_t>(self->text().size()); });
    return c;
  }();
  return info;
}

const ClassInfo& error_class() {
  static const ClassInfo info = [] {
    ClassInfo c("NSError", &ns_object());
    c.method("code", [](Error* self, SEL) { return self->code(); });
    c.method("localizedDescription",
             [](Error* self, SEL) { return autoreleased(Ref<String>::adopt(new String(self->description()))); });
    return c;
  }();
  return info;
}

const ClassInfo& array_class() {
  static const ClassInfo info = [] {
    ClassInfo c("NSArray", &ns_object());
    c.method("count", [](Array* self, SEL) { return static_cast<uint64_t>(self->objects.size()); });
    c.method("objectAtIndex:", [](Array* self, SEL, uint64_t index) -> Object* {
      if (index < self->objects.size()) return self->objects[index].get();
      violation("an index outside an NSArray");
      return nullptr;
    });
    return c;
  }();
  return info;
}

Array::Array(std::vector<Ref<Object>> items) : Object(array_class()), objects(std::move(items)) {}

// A file's URL is its path.
const ClassInfo& url_class() {
  static const ClassInfo info = [] {
    ClassInfo c("NSURL", &ns_object());
    c.class_method("fileURLWithPath:", [](Object*, SEL, String* path) -> Object* {
      return autoreleased(Ref<String>::adopt(new String(path->text())));
    });
    return c;
  }();
  return info;
}

const ClassInfo& process_info_class() {
  static const ClassInfo info = [] {
    ClassInfo c("NSProcessInfo", &ns_object());
    c.class_method("processInfo",
                   [](Object*, SEL) { return autoreleased(Ref<Object>::adopt(new Object(process_info_class()))); });
    c.method("isOperatingSystemAtLeastVersion:",
             [](Object*, SEL, SystemVersion version) { return behaviour().system_version >= version.major; });
    return c;
  }();
  return info;
}

}  // namespace

String::String(std::string text) : Object(string_class()), text_(std::move(text)) {}

Error::Error(int64_t code, std::string description)
    : Object(error_class()), code_(code), description_(std::move(description)) {}

void set_error(Error** error, int64_t code, std::string description) {
  if (error != nullptr) *error = autoreleased(Ref<Error>::adopt(new Error(code, std::move(description))));
}

Object* string_array(const std::vector<std::string>& strings) {
  std::vector<Ref<Object>> objects;
  for (const std::string& string : strings) objects.push_back(Ref<Object>::adopt(new String(string)));
  return autoreleased(Ref<Array>::adopt(new Array(std::move(objects))));
}

const std::unordered_map<std::string_view, const ClassInfo*>& foundation_classes() {
  static const std::unordered_map<std::string_view, const ClassInfo*> classes = {
      {"NSString", &string_class()},
      {"NSError", &error_class()},
      {"NSArray", &array_class()},
      {"NSURL", &url_class()},
      {"NSProcessInfo", &process_info_class()},
  };
  return classes;
}

}  // namespace flexpte::metal_double
