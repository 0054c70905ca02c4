#include "reference.h"

#include <algorithm>
#include <cmath>

#include "core/band.h"

namespace flash_ext {
namespace {

double dot(int64_t count, const double* x, const double* y) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

void add(int64_t count, double factor, const double* x, double* y) {
  for (int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

}  // namespace

Results reference(const Case& c, const Problem& problem, const Inputs& in, bool multiplies_hidden) {
  const int64_t n = c.len_k, d = c.d > 0 ? c.d : c.head_dim, d_v = c.d_v > 0 ? c.d_v : c.head_dim;
  const int64_t rows = c.one_row ? 1 : c.len_q, bias_heads = c.one_head ? 1 : c.heads_q;  // of bias and mask
  Results r;
  std::vector<double> dk(c.batch * c.heads_k * n * d), dv(c.batch * c.heads_v * n * d_v), dbias(bias_heads * rows * n);
  const Band band = make_band(problem);
  constexpr DropoutPlace place = kPartOfDropout;
  const double keep_scale = c.dropout < 1 ? 1 / (1 - c.dropout) : 0;
  const int64_t diagonal = c.bottom_right ? n - c.len_q : 0;
  for (int bh = 0; bh < c.batch * c.heads_q; ++bh) {
    const int h = bh % c.heads_q, bias_head = c.one_head ? 0 : h, hk = bh / (c.heads_q / c.heads_k),
              hv = bh / (c.heads_q / c.heads_v);
    double d_slope = 0;
    for (int64_t i = 0; i < c.len_q; ++i) {
      const double *query = &in.q[(bh * c.len_q + i) * d], *d_out = &in.d_out[(bh * c.len_q + i) * d_v];
      const auto key = [&](int64_t j) { return (hk * n + j) * d; };  // where its row begins
      const auto value = [&](int64_t j) { return (hv * n + j) * d_v; };
      const Range keys = band.keys({i, i + 1}, n);
      std::vector<double> s(n, -INFINITY), slope(n, 1), p(n), kept(n, 1);
      std::vector<int64_t> visible, summed;  // keys
      double most = -INFINITY, sum = 0;
      const int64_t row = c.one_row ? 0 : i;
      for (int64_t j = keys.first; j < keys.last; ++j) {
        if (c.mask && in.mask[(bias_head * rows + row) * n + j] == 0) continue;
        double x = problem.scale * dot(d, query, &in.k[key(j)]);
        if (c.value != nullptr) {
          const auto distance = static_cast<double>(i + diagonal - j);
          slope[j] = c.slope_of_value(x, distance);
          x = c.value(x, distance);
        } else if (c.softcap > 0) {
          const double t = std::tanh(x / c.softcap);
          x = c.softcap * t;
          slope[j] = 1 - t * t;
        }
        if (c.bias) x += in.bias[(bias_head * rows + row) * n + j];
        if (c.alibi) x -= in.slopes[h] * std::abs(double(i + diagonal - j));
        if (c.dropout > 0)
          kept[j] = in.dropout.keep(place.bh(bh / c.heads_q, bh), place.query(i), place.key(j)) ? keep_scale : 0;
        s[j] = x;
        most = std::max(most, x);
        visible.push_back(j);
      }
      const double sink = c.sinks ? in.sinks[bh] : -INFINITY;
      most = std::max(most, sink);
      for (const int64_t j : visible) sum += p[j] = s[j] == -INFINITY ? 0 : std::exp(s[j] - most);
      if (sink != -INFINITY) sum += std::exp(sink - most);
      const bool has_keys = sum != 0;  // NaN is a sum, too
      r.lse.push_back(static_cast<float>(has_keys ? most + std::log(sum) : -INFINITY));
      if (!has_keys) visible.clear();
      for (int64_t j = 0; j < n && multiplies_hidden; ++j) summed.push_back(j);
      if (!multiplies_hidden) summed = visible;
      for (const int64_t j : summed) p[j] = has_keys ? p[j] / sum : 0;
      std::vector<double> out(d_v), dp(n), ds(n), dq(d);
      for (const int64_t j : summed) {
        add(d_v, p[j] * kept[j], &in.v[value(j)], out.data());
        add(d_v, p[j] * kept[j], d_out, &dv[value(j)]);
        dp[j] = kept[j] * dot(d_v, d_out, &in.v[value(j)]);
      }
      r.out.insert(r.out.end(), out.begin(), out.end());
      const double delta = dot(d_v, out.data(), d_out) - (has_keys && c.d_lse ? double(in.d_lse[bh * c.len_q + i]) : 0);
      for (const int64_t j : visible) {
        ds[j] = p[j] * (dp[j] - delta);
        dbias[(bias_head * rows + row) * n + j] += ds[j];
        d_slope -= ds[j] * std::abs(double(i + diagonal - j));
        ds[j] *= slope[j] * problem.scale;
      }
      for (const int64_t j : summed) {
        add(d, ds[j], &in.k[key(j)], dq.data());
        add(d, ds[j], query, &dk[key(j)]);
      }
      r.dq.insert(r.dq.end(), dq.begin(), dq.end());
    }
    r.dalibi.push_back(static_cast<float>(d_slope));
  }
  r.dk.assign(dk.begin(), dk.end());
  r.dv.assign(dv.begin(), dv.end());
  r.dbias.assign(dbias.begin(), dbias.end());
  return r;
}

double error(const std::vector<float>& result, const std::vector<float>& reference) {
  double wrong = 0, all = 1e-12;
  if (result.size() != reference.size()) return INFINITY;
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i] == reference[i]) continue;
    wrong += std::pow(double(result[i]) - double(reference[i]), 2);
    all += std::isinf(reference[i]) ? 0 : std::pow(double(reference[i]), 2);
  }
  return std::sqrt(wrong / all);
}

int misplaced(const std::vector<float>& result, const std::vector<float>& reference, const std::vector<float>& eager,
              bool of_gradient) {
  const auto kind = [&](float x) {
    if (std::isfinite(x)) return 0;
    return of_gradient || std::isnan(x) ? 1 : (x > 0 ? 2 : 3);
  };
  int count = 0;
  for (size_t i = 0; i < result.size(); ++i) {
    count += kind(result[i]) != kind(reference[i]) && kind(result[i]) != kind(eager[i]);
  }
  return count;
}

}  // namespace flash_ext
