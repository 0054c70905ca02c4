// Text for error messages, without iostreams: a library that links its own copy of them into a process that has another
// crashes at the first number.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/SymInt.h>

#include <cstdio>
#include <string>
#include <string_view>

namespace flash_ext {

inline std::string text(const char* part) { return part; }
inline std::string text(const std::string& part) { return part; }
inline std::string text(std::string_view part) { return std::string(part); }
inline std::string text(int64_t number) { return std::to_string(number); }
inline std::string text(const c10::Device& device) { return device.str(); }
inline std::string text(const c10::SymInt& number) {
  const auto known = number.maybe_as_int();
  return known.has_value() ? std::to_string(*known) : number.toSymNode()->str();
}
inline std::string text(double number) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%g", number);
  return buffer;
}

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string result;
  ((result += text(parts)), ...);
  return result;
}

}  // namespace flash_ext
