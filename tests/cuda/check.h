// What programs that test on a GPU without torch share: checked calls, memory both sides see, a line a case.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

namespace flash_ext::sm90 {

inline int failures = 0;

inline void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Memory both sides see.
template <class T>
struct Managed {
  T* data = nullptr;
  size_t count;
  explicit Managed(size_t count_, T value = T()) : count(count_) {
    must(cudaMallocManaged(&data, count * sizeof(T)), "allocation");
    for (size_t i = 0; i < count; ++i) data[i] = value;
  }
  Managed(const Managed&) = delete;
  ~Managed() { cudaFree(data); }
  T& operator[](size_t i) { return data[i]; }
};

inline float random_number() { return static_cast<float>(std::rand() % 257 - 128) / 64.f; }

template <class T>
constexpr const char* name_of() {
  return sizeof(T) == 1 ? "e4m3" : std::is_same_v<T, __half> ? "fp16" : "bf16";
}

// Compares got(row, col) with expected(row, col), and prints the case's line.
template <class Got, class Expected>
void compare(const std::string& name, int rows, int cols, double tolerance, Got got, Expected expected) {
  int wrong = 0;
  double worst = 0;
  std::string first;
  for (int row = 0; row < rows; ++row) {
    for (int col = 0; col < cols; ++col) {
      const double x = got(row, col), y = expected(row, col), difference = std::abs(x - y);
      if (!(difference <= tolerance)) {
        char text[96];
        std::snprintf(text, sizeof(text), "  (%d, %d) %g not %g", row, col, x, y);
        if (wrong++ < 6) first += text;
      }
      worst = difference > worst ? difference : worst;
    }
  }
  failures += wrong > 0;
  std::printf("%s %-44s max error %.1e", wrong > 0 ? "FAIL" : "ok  ", name.c_str(), worst);
  if (wrong > 0) std::printf("  %d of %d wrong:%s", wrong, rows * cols, first.c_str());
  std::printf("\n");
}

}  // namespace flash_ext::sm90
