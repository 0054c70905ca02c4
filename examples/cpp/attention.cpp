// Attention from C++, forward and backward, without Python: LibTorch and libflash_ext.so are all it takes.
// The operators register themselves when the library is loaded; the dispatcher then finds them by name.
//   ./attention path/to/libflash_ext.so
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <cstdio>

using at::Tensor;
using Sdpa = Tensor(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                    std::optional<double>, bool);

int main(int argc, char** argv) {
  if (argc != 2 || dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "usage: attention libflash_ext.so\n%s\n", argc == 2 ? dlerror() : "");
    return 2;
  }
  auto sdpa =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_ext::scaled_dot_product_attention", "").typed<Sdpa>();

  // [batch, heads, tokens, head_dim]; four query heads read one key head
  Tensor query = at::randn({2, 8, 100, 64}).requires_grad_();
  Tensor key = at::randn({2, 2, 100, 64}).requires_grad_();
  Tensor value = at::randn({2, 2, 100, 64}).requires_grad_();
  Tensor out = sdpa.call(query, key, value, std::nullopt, /*dropout_p=*/0.0, /*is_causal=*/true,
                         /*scale=*/std::nullopt, /*enable_gqa=*/true);
  out.square().sum().backward();

  Tensor q = query.detach().requires_grad_();
  Tensor expected = at::scaled_dot_product_attention(q, key, value, {}, 0.0, true, std::nullopt, true);
  expected.square().sum().backward();
  double forward_error = (out - expected).abs().max().item<double>();
  double backward_error = (query.grad() - q.grad()).abs().max().item<double>();
  std::printf("largest difference from PyTorch: out %.1e, grad_query %.1e\n", forward_error, backward_error);
  return forward_error < 1e-5 && backward_error < 1e-4 ? 0 : 1;
}
