// csrc/kernels/sm90's wrappers against the CPU: each wgmma shape and operand form in use, on tiles whose bytes the host
// has laid out by descriptor.h; TMA loads and stores of strided tensors with tails and broadcasts; bulk copies and
// additions; stmatrix.
//
// A program of its own, because it needs a GPU of compute capability 9.0 and no torch (CMakeLists.txt beside it):
//   cmake --build build/<folder> --target sm90_wgmma_test && build/<folder>/tests/cuda/sm90_wgmma_test
// Prints a line a case, the first wrong elements of a case that fails, and returns 1 if one did. No wait is endless.
#define FLASH_EXT_BOUNDED_WAITS
#include <cuda_fp8.h>

#include <vector>

#include "check.h"
#include "gpu/host/launch.h"
#include "gpu/host/tensor_map.h"
#include "gpu/wgmma.cuh"
#include "kernels/sm90/descriptor.h"
#include "kernels/sm90/pipeline.cuh"

namespace flash_ext::sm90 {
namespace {

using cuda::make_tensor_map, cuda::Promotion;

// ---- wgmma ----------------------------------------------------------------------------------------------------------

extern __shared__ char dynamic_smem[];

__device__ uint32_t aligned_base() { return (shared_address(dynamic_smem) + kTileAlign - 1) & ~(kTileAlign - 1); }

__device__ void copy_to_shared(uint32_t shared, const void* from, int bytes) {
  for (int i = threadIdx.x * 4; i < bytes; i += blockDim.x * 4) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(static_cast<const char*>(from) + i);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared + i), "r"(word) : "memory");
  }
}

template <int kN>
__device__ void write_accumulators(const float (&c)[kN / 2], float* to) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  for (int i = 0; i < kN / 2; ++i) to[(row + i / 2 % 2 * 8) * kN + i / 4 * 8 + col + i % 2] = c[i];
}

// T as Wgmma says it; tiles count two numbers of e4m3 as a column.
template <class T>
using Product = std::conditional_t<sizeof(T) == 1, E4m3, T>;
template <class T>
constexpr int columns(int count) {
  return count * static_cast<int>(sizeof(T)) / 2;
}

// C = A B^T + 1. A is the second half of a tile of 128 rows, as that of a second warpgroup is.
template <class T, int kN, int kK>
__global__ void __launch_bounds__(128, 1) ss_kernel(const char* a_image, const char* b_image, float* out) {
  constexpr int kCols = columns<T>(kK);
  const uint32_t a_tile = aligned_base(), b_tile = a_tile + tile_bytes(128, kCols);
  copy_to_shared(a_tile, a_image, tile_bytes(128, kCols));
  copy_to_shared(b_tile, b_image, tile_bytes(kN, kCols));
  fence_async_proxy();
  __syncthreads();
  float c[kN / 2];
#pragma unroll
  for (float& x : c) x = 1.f;
  const uint64_t a = k_major(a_tile + 64 * kPanelBytes), b = k_major(b_tile);
  fence_registers(c);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    Wgmma<Product<T>, kN>::ss(c, a + k_major_step(128, k), b + k_major_step(kN, k), 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(c);
  write_accumulators<kN>(c, out);
}

// C = A B, A [64, kK] from global memory to registers, B [kK, kN] MN-major or, with kMnB 0, its transpose [kN, kK]
// K-major; scale-d 0 must drop what c held.
template <class T, int kN, int kK, int kMnB>
__global__ void __launch_bounds__(128, 1) rs_kernel(const T* a_matrix, const char* b_image, float* out) {
  const uint32_t b_tile = aligned_base();
  constexpr int kCols = columns<T>(kK), kEach = 2 / sizeof(T);
  copy_to_shared(b_tile, b_image, kMnB ? tile_bytes(kK, kN) : tile_bytes(kN, kCols));
  fence_async_proxy();
  __syncthreads();
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  float c[kN / 2];
  uint32_t a[kCols / 4];
#pragma unroll
  for (float& x : c) x = 1e30f;
#pragma unroll
  for (int i = 0; i < kCols / 4; ++i) {
    const int first = (i / 4 * 16 + i / 2 % 2 * 8 + col) * kEach;
    a[i] = *reinterpret_cast<const uint32_t*>(a_matrix + (row + i % 2 * 8) * kK + first);
  }
  const uint64_t b = kMnB ? mn_major(b_tile, kK) : k_major(b_tile);
  fence_registers(c);
  fence_registers(a);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    Wgmma<Product<T>, kN>::template rs<kMnB>(c, a + 4 * k, b + (kMnB ? mn_major_step(k) : k_major_step(kN, k)), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(c);
  write_accumulators<kN>(c, out);
}

// C = A^T B, both MN-major: A [kK, 64], the panel `panel` of a tile of 128 columns, B [kK, kN], from a panel on, too.
template <class T, int kN, int kK>
__global__ void __launch_bounds__(128, 1) mn_kernel(const char* a_image, const char* b_image, int panel, float* out) {
  const uint32_t a_tile = aligned_base(), b_tile = a_tile + tile_bytes(kK, 128);
  copy_to_shared(a_tile, a_image, tile_bytes(kK, 128));
  copy_to_shared(b_tile, b_image, tile_bytes(kK, 128));
  fence_async_proxy();
  __syncthreads();
  float c[kN / 2];
#pragma unroll
  for (float& x : c) x = 1e30f;
  const uint64_t a = mn_major(a_tile + panel * panel_size(kK), kK);
  const uint64_t b = mn_major(b_tile + (kN == 64 ? panel * panel_size(kK) : 0), kK);
  fence_registers(c);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    Wgmma<T, kN>::template ss<1, 1>(c, a + mn_major_step(k), b + mn_major_step(k), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(c);
  write_accumulators<kN>(c, out);
}

// A matrix on the host, and its tile's bytes. Rows past `rows` of the tile are NaN.
template <class T>
struct HostTile {
  int rows, cols, tile_rows;
  std::vector<float> values;
  Managed<T> matrix;
  Managed<char> image;

  HostTile(int rows_, int cols_, int tile_rows_, int first_row)
      : rows(rows_),
        cols(cols_),
        tile_rows(tile_rows_),
        values(rows * cols),
        matrix(rows * cols),
        image(tile_bytes(tile_rows, columns<T>(cols)), '\xff') {
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < cols; ++col) {
        const T x = static_cast<T>(random_number());
        values[row * cols + col] = static_cast<float>(x);
        matrix[row * cols + col] = x;
        constexpr int kEach = 2 / sizeof(T);  // in a column of the tile
        *reinterpret_cast<T*>(&image[tile_offset(tile_rows, first_row + row, col / kEach) + col % kEach]) = x;
      }
    }
  }
  double at(int row, int col) const { return values[row * cols + col]; }
};

// Of e4m3 wgmma keeps 13 bits behind the point of the largest of what it adds.
template <class T>
constexpr double kTolerance = sizeof(T) == 1 ? 2e-2 : 1e-3;

template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
}

template <class T, int kN, int kK>
void test_ss() {
  const HostTile<T> a(64, kK, 128, 64), b(kN, kK, kN, 0);
  Managed<float> c(64 * kN, NAN);
  const int smem = tile_bytes(128, columns<T>(kK)) + tile_bytes(kN, columns<T>(kK)) + kTileAlign;
  allow_shared(ss_kernel<T, kN, kK>, smem);
  ss_kernel<T, kN, kK><<<1, 128, smem>>>(a.image.data, b.image.data, c.data);
  must(cudaDeviceSynchronize(), "ss");
  compare(
      std::string("wgmma ss ") + name_of<T>() + " n " + std::to_string(kN) + " k " + std::to_string(kK), 64, kN,
      kTolerance<T>, [&](int row, int col) { return c[row * kN + col]; },
      [&](int row, int col) {
        double sum = 1;
        for (int k = 0; k < kK; ++k) sum += a.at(row, k) * b.at(col, k);
        return sum;
      });
}

template <class T, int kN, int kK, int kMnB = 1>
void test_rs() {
  constexpr int kRows = kMnB ? kK : kN;  // of B's tile
  const HostTile<T> a(64, kK, 64, 0), b(kRows, kMnB ? kN : kK, kRows, 0);
  Managed<float> c(64 * kN, NAN);
  const int smem = tile_bytes(kRows, kMnB ? kN : columns<T>(kK)) + kTileAlign;
  allow_shared(rs_kernel<T, kN, kK, kMnB>, smem);
  rs_kernel<T, kN, kK, kMnB><<<1, 128, smem>>>(a.matrix.data, b.image.data, c.data);
  must(cudaDeviceSynchronize(), "rs");
  compare(
      std::string(kMnB ? "wgmma rs " : "wgmma rs, k-major, ") + name_of<T>() + " n " + std::to_string(kN) + " k " +
          std::to_string(kK),
      64, kN, kTolerance<T>, [&](int row, int col) { return c[row * kN + col]; },
      [&](int row, int col) {
        double sum = 0;
        for (int k = 0; k < kK; ++k) sum += a.at(row, k) * (kMnB ? b.at(k, col) : b.at(col, k));
        return sum;
      });
}

template <class T, int kN, int kK>
void test_mn(int panel) {
  const HostTile<T> a(kK, 128, kK, 0), b(kK, 128, kK, 0);
  Managed<float> c(64 * kN, NAN);
  const int smem = 2 * tile_bytes(kK, 128) + kTileAlign, first = kN == 64 ? 64 * panel : 0;
  allow_shared(mn_kernel<T, kN, kK>, smem);
  mn_kernel<T, kN, kK><<<1, 128, smem>>>(a.image.data, b.image.data, panel, c.data);
  must(cudaDeviceSynchronize(), "mn");
  compare(
      std::string("wgmma ss, both mn-major, ") + name_of<T>() + " n " + std::to_string(kN) + " k " +
          std::to_string(kK) + " panel " + std::to_string(panel),
      64, kN, 1e-3, [&](int row, int col) { return c[row * kN + col]; },
      [&](int row, int col) {
        double sum = 0;
        for (int k = 0; k < kK; ++k) sum += a.at(k, 64 * panel + row) * b.at(k, first + col);
        return sum;
      });
}

template <class T>
void test_products() {
  for (const int panel : {0, 1}) {
    test_mn<T, 64, 128>(panel);
    test_mn<T, 64, 64>(panel);
    test_mn<T, 128, 128>(panel);
  }
  test_ss<T, 16, 256>(), test_ss<T, 32, 256>();
  test_ss<T, 48, 256>();
  test_ss<T, 64, 64>();
  test_ss<T, 80, 256>();
  test_ss<T, 96, 96>();
  test_ss<T, 112, 192>();
  test_ss<T, 128, 64>();
  test_ss<T, 128, 128>();
  test_ss<T, 144, 96>();
  test_ss<T, 160, 128>();
  test_ss<T, 176, 128>();
  test_ss<T, 192, 64>();
  test_ss<T, 256, 64>();
  test_rs<T, 64, 64>();
  test_rs<T, 64, 128>();
  test_rs<T, 64, 192>();
  test_rs<T, 96, 128>();
  test_rs<T, 128, 128>();
  test_rs<T, 128, 176>();
  test_rs<T, 192, 112>();
  test_rs<T, 256, 16>();
  test_rs<T, 256, 32>();
  test_rs<T, 256, 48>();
  test_rs<T, 256, 80>();
  test_rs<T, 64, 128, 0>();
  test_rs<T, 128, 64, 0>();
}

// ---- TMA ------------------------------------------------------------------------------------------------------------

// One tile of kRows rows by two panels, through shared memory as it is.
template <int kRows>
__global__ void load_kernel(const __grid_constant__ TensorMap map, BoxStart at, char* image) {
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t tile = aligned_base(), full = shared_address(&barrier);
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    fence_barrier_init();
    barrier_expect(full, tile_bytes(kRows, 128));
    tma_load(tile, &map.map, full, at);
    at.col += kPanelCols;
    tma_load(tile + panel_size(kRows), &map.map, full, at);
  }
  __syncthreads();
  barrier_wait(full, 0);
  for (int i = threadIdx.x; i < tile_bytes(kRows, 128); i += blockDim.x) {
    uint32_t byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(tile + i) : "memory");
    image[i] = static_cast<char>(byte);
  }
}

// 16 rows by two panels, from accumulators by stmatrix: element (row, col) is 128 row + col.
__global__ void store_kernel(const __grid_constant__ TensorMap map, BoxStart at) {
  const uint32_t tile = aligned_base();
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const auto pair = [&](int row, int col) {
    return pack(static_cast<float>(128 * row + col), static_cast<float>(128 * row + col + 1), __half());
  };
  for (int k = 0; k < 8; ++k) {
    const int col = 16 * k + 2 * t;
    stmatrix_x4(tile + tile_offset(16, lane % 16, 16 * k + lane / 16 * 8), pair(g, col), pair(g + 8, col),
                pair(g, col + 8), pair(g + 8, col + 8));
  }
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
    tma_store(&map.map, tile, at);
    at.col += kPanelCols;
    tma_store(&map.map, tile + panel_size(16), at);
    bulk_commit();
    bulk_wait_read();
  }
}

// Each warp: 1024 floats of its own to shared memory, doubled there, and added to `to` from two blocks.
__global__ void bulk_kernel(const float* from, float* to) {
  constexpr int kBytes = 4096;
  __shared__ alignas(128) float numbers[4][kBytes / 4];
  __shared__ alignas(8) uint64_t barriers[4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t full = shared_address(&barriers[warp]), buffer = shared_address(numbers[warp]);
  if (lane == 0) {
    barrier_init(full, 1);
    fence_barrier_init();
    barrier_expect(full, kBytes);
    bulk_load(buffer, from + warp * (kBytes / 4), full, kBytes);
  }
  __syncwarp();
  barrier_wait(full, 0);
  for (int i = lane; i < kBytes / 4; i += 32) numbers[warp][i] *= 2;
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
    bulk_add(to + warp * (kBytes / 4), buffer, kBytes);
    bulk_commit();
    bulk_wait_read();
  }
}

void test_bulk() {
  Managed<float> from(4096), to(4096 + 32, 0.5f);
  for (size_t i = 0; i < from.count; ++i) from[i] = random_number();
  bulk_kernel<<<2, 128>>>(from.data, to.data);
  must(cudaDeviceSynchronize(), "bulk");
  compare(
      "bulk load and two additions", 1, static_cast<int>(to.count), 0, [&](int, int i) { return to[i]; },
      [&](int, int i) { return i < 4096 ? 0.5f + 4 * from[i] : 0.5f; });
}

// A tensor [b1, b0, head, rows, cols] of fp16 whose strides leave gaps.
struct Strided {
  static constexpr int kB1 = 2, kB0 = 3, kHeads = 4, kRows = 45;
  int cols;
  Problem problem;
  TensorView view;
  Managed<__half> memory;

  Strided(int cols_, bool broadcast_head) : cols(cols_), memory(kB1 * kB0 * kHeads * 50 * 136, __half(-1.f)) {
    problem.dtype = DType::kFloat16;
    problem.batch_rank = 2;
    problem.batch_size[0] = kB1;
    problem.batch_size[1] = kB0;
    problem.batch = kB1 * kB0;
    view.data = memory.data;
    view.col_stride = 1;
    view.head_stride = broadcast_head ? 0 : 136;  // heads lie inside rows, as after a transpose
    view.row_stride = kHeads * 136;
    view.batch_stride[0] = 50 * kHeads * 136;  // so the outer batch is nearer than the inner one
    view.batch_stride[1] = kB1 * 50 * kHeads * 136;
  }
  size_t at(int b1, int b0, int head, int row, int col) const {
    return b1 * view.batch_stride[0] + b0 * view.batch_stride[1] + head * view.head_stride + row * view.row_stride +
           col;
  }
};

// box_heads: that share a box, kRows / box_heads rows each.
template <int kRows>
void test_load(int cols, int row, bool broadcast_head, int head = 3, int box_heads = 1) {
  Strided tensor(cols, broadcast_head);
  for (size_t i = 0; i < tensor.memory.count; ++i) tensor.memory[i] = __half(random_number());
  const int rows = kRows / box_heads;
  const TensorMap map = make_tensor_map(tensor.problem, tensor.view, Strided::kHeads, Strided::kRows, cols, rows,
                                        Promotion::k128, box_heads);
  const int b1 = 1, b0 = 2;
  Managed<char> image(tile_bytes(kRows, 128), '\x7f');
  allow_shared(load_kernel<kRows>, tile_bytes(kRows, 128) + kTileAlign);
  load_kernel<kRows><<<1, 128, tile_bytes(kRows, 128) + kTileAlign>>>(
      map, {0, row, head * map.steps.head, b0 * map.steps.b0, b1 * map.steps.b1}, image.data);
  must(cudaDeviceSynchronize(), "load");
  compare(
      "tma load, " + std::to_string(kRows) + " rows from " + std::to_string(row) + ", cols " + std::to_string(cols) +
          (broadcast_head ? ", one head" : "") + (box_heads > 1 ? ", " + std::to_string(box_heads) + " heads" : ""),
      kRows, 128, 0,
      [&](int i, int j) { return static_cast<float>(*reinterpret_cast<__half*>(&image[tile_offset(kRows, i, j)])); },
      [&](int i, int j) {
        const int of_head = head + i / rows, of_row = row + i % rows;
        if (of_head >= Strided::kHeads || of_row >= Strided::kRows || j >= cols) return 0.f;
        return static_cast<float>(tensor.memory[tensor.at(b1, b0, of_head, of_row, j)]);
      });
}

void test_store(int cols, int row) {
  Strided tensor(cols, false);
  const TensorMap map =
      make_tensor_map(tensor.problem, tensor.view, Strided::kHeads, Strided::kRows, cols, 16, Promotion::k256);
  const int b1 = 1, b0 = 2, head = 3;
  store_kernel<<<1, 32, tile_bytes(16, 128) + kTileAlign>>>(map, {0, row, head, b0, b1});
  must(cudaDeviceSynchronize(), "store");
  std::vector<float> expected(tensor.memory.count, -1.f);
  for (int i = 0; i < 16 && row + i < Strided::kRows; ++i) {
    for (int j = 0; j < cols; ++j) expected[tensor.at(b1, b0, head, row + i, j)] = static_cast<float>(128 * i + j);
  }
  compare(
      "tma store, 16 rows from " + std::to_string(row) + ", cols " + std::to_string(cols),
      static_cast<int>(tensor.memory.count / 136), 136, 0,
      [&](int i, int j) { return static_cast<float>(tensor.memory[i * 136 + j]); },
      [&](int i, int j) { return expected[i * 136 + j]; });
}

}  // namespace
}  // namespace flash_ext::sm90

int main() {
  using namespace flash_ext::sm90;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("skipped: there is no GPU\n");
    return 0;
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "device");
  if (device.major != 9 || device.minor != 0) {
    std::printf("skipped: compute capability %d.%d is not 9.0\n", device.major, device.minor);
    return 0;
  }
  for (const int cols : {128, 72, 40}) {
    test_load<128>(cols, 0, false);
    test_load<80>(cols, 16, false);
    test_load<16>(cols, 32, true);
    for (const int heads : {2, 8, 64}) test_load<64>(cols, 0, false, heads > 4 ? 0 : 2, heads);
    test_store(cols, 0);
    test_store(cols, 32);
  }
  test_bulk();
  test_products<__nv_bfloat16>();
  test_products<__half>();
  test_ss<__nv_fp8_e4m3, 128, 64>();
  test_ss<__nv_fp8_e4m3, 192, 128>();
  test_rs<__nv_fp8_e4m3, 72, 128, 0>();
  test_rs<__nv_fp8_e4m3, 136, 192, 0>();
  std::printf(failures > 0 ? "%d cases failed\n" : "all cases passed\n", failures);
  return failures > 0;
}
