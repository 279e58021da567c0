// nibble selftest [DIR]: kernels against their references on the machine at hand. On a GPU every
// kernel of the forward pass; on the CPU the products, in every instruction set that this machine
// has (norms, attention and the router of the CPU are left to the unit tests).
#include "cli/selftest.h"

#include <bit>
#include <chrono>
#include <iomanip>
#include <optional>
#include <ostream>

#include "cli/command.h"
#include "cli/session.h"
#include "device/cpu.h"
#include "device/cuda.h"
#include "kernels/matmul/product_check.h"

namespace nibble::cli {
namespace {

using kernels::Activations;
using kernels::testing::Matrix;
using kernels::testing::MatrixCase;

struct Options {
  std::string directory, device = "auto";
  int threads = 0;
};

/// Does the checkpoint hold a matrix that this case's kernel reads?
bool used_by(const recipe::Recipe* recipe, const MatrixCase& c) {
  if (recipe == nullptr) return true;
  for (const auto& [key, weight] : recipe->weights()) {
    if (weight.meta.rows > 1 && weight.meta.format == c.format &&
        weight.meta.scale_kind == c.scale_kind) {
      return true;
    }
  }
  return false;
}

bool same_values(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
  }
  return a.size() == b.size();
}

/// Counts checks of one line.
class Tally {
 public:
  Tally(std::string kernel, std::string format) {
    verdict_.kernel = std::move(kernel);
    verdict_.format = std::move(format);
  }
  void expect(bool ok, const std::string& what) {
    ++verdict_.checks;
    if (!ok && ++verdict_.failed <= 10) verdict_.failures += cat("FAILED ", what, '\n');
  }
  void within(double share_of_bound, const std::string& what) {
    verdict_.worst = std::max(verdict_.worst, share_of_bound);
    expect(share_of_bound <= 1, cat(what, ": ", share_of_bound, " of the bound"));
  }
  const KernelVerdict& verdict() const { return verdict_; }

 private:
  KernelVerdict verdict_;
};

constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 8, 17, 64, 256};
constexpr int64_t kMostRows = 256;

/// Products of one format: the bound at the largest row count, whose bits all others must have.
void check_products(Tally& tally, const Matrix& m, ThreadPool& pool) {
  const int64_t n = m.rows_view.rows, k = m.rows_view.cols;
  const std::vector<float> x = kernels::testing::random_floats(kMostRows * k, 2);
  const std::vector<float> bias = kernels::testing::random_floats(n, 3);
  for (const device::Isa isa : device::available_isas()) {
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      const std::string where = cat(device::isa_name(isa), act == Activations::kF32 ? " f32" : "");
      const auto all =
          kernels::testing::product(isa, act, &pool, m.tiled, x, kMostRows, bias.data());
      tally.within(kernels::testing::worst_product_error(m, x, kMostRows, act, all, bias.data()),
                   where);
      for (const int64_t rows : kRows) {
        const auto part = kernels::testing::product(isa, act, &pool, m.tiled, x, rows, bias.data());
        tally.expect(same_values(part, {all.begin(), all.begin() + rows * n}),
                     cat(where, ": rows ", rows, " have other bits than in ", kMostRows));
      }
    }
  }
}

/// Compressed scales give the plain product's bits.
void check_compressed(Tally& tally, const Matrix& m, ThreadPool& pool) {
  codec::CsfTiles tiles;
  const tensor::TensorRef csf = kernels::testing::compress_scales(m, tiles);
  const std::vector<float> x = kernels::testing::random_floats(kMostRows * m.rows_view.cols, 4);
  for (const device::Isa isa : device::available_isas()) {
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      for (const int64_t rows : kRows) {
        tally.expect(same_values(kernels::testing::product(isa, act, &pool, csf, x, rows),
                                 kernels::testing::product(isa, act, &pool, m.tiled, x, rows)),
                     cat(device::isa_name(isa), ": rows ", rows, " have other bits than plain"));
      }
    }
  }
}

void selftest_cpu(const recipe::Recipe* recipe, ThreadPool& pool, const VerdictSink& sink) {
  for (const MatrixCase& c : kernels::testing::all_matrix_cases()) {
    if (!used_by(recipe, c)) continue;
    const auto m = kernels::testing::random_matrix(c, 48, 320, 1);
    Tally plain("matmul", c.name);
    check_products(plain, *m, pool);
    sink(plain.verdict());
    if (c.name != "nvfp4" && c.name != "mxfp4" && c.name != "mxfp8") continue;
    Tally compressed("matmul", c.name + " csf");
    check_compressed(compressed, *m, pool);
    sink(compressed.verdict());
  }
}

/// The device to test: none for the CPU. `why` says why the CPU, for one line.
Result<std::optional<device::CudaDevice>> choose_device(const std::string& name, std::string& why) {
  why = "as asked";
  if (name == "cpu") return std::optional<device::CudaDevice>();
  Result<device::CudaDevice> device = device::cuda_device(cuda_index(name));
  if (device) return std::optional<device::CudaDevice>(*std::move(device));
  if (name != "auto") return device.error();
  why = device.error().message();
  return std::optional<device::CudaDevice>();
}

Result<bool> run(const Options& options, std::ostream& out) {
  std::optional<recipe::Recipe> recipe;
  if (!options.directory.empty()) {
    NIBBLE_TRY(recipe, recipe::read_recipe(options.directory));
  }
  const recipe::Recipe* only = recipe ? &*recipe : nullptr;
  std::string why;
  NIBBLE_TRY(const std::optional<device::CudaDevice> gpu, choose_device(options.device, why));
  int64_t lines = 0, failed = 0;
  const VerdictSink sink = [&](const KernelVerdict& v) {
    out << (v.failed == 0 ? "ok    " : "FAIL  ") << std::left << std::setw(11) << v.kernel
        << std::setw(22) << v.format << std::right << std::setw(7) << v.checks << " checks, ";
    if (v.failed > 0) out << v.failed << " failed, ";
    if (v.worst > 0) {
      out << "largest error " << std::setprecision(3) << v.worst << " of its bound\n";
    } else {
      out << "bits compared\n";
    }
    out << v.failures << std::flush;
    ++lines;
    failed += v.failed > 0 ? 1 : 0;
  };
  const auto start = std::chrono::steady_clock::now();
  if (gpu) {
    out << "device: cuda:" << gpu->index << " (" << gpu->name << ")\n";
    NIBBLE_TRY(selftest_cuda(only, sink));
  } else {
    out << "device: cpu (" << why << "), instruction sets";
    for (const device::Isa isa : device::available_isas()) out << ' ' << device::isa_name(isa);
    out << '\n';
    ThreadPool pool(options.threads);
    selftest_cpu(only, pool, sink);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  out << lines << " kernels and formats, " << failed << " failed, " << std::fixed
      << std::setprecision(1) << seconds << " s\n";
  return failed == 0;
}

}  // namespace

RunFn add_selftest(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("DIR", options->directory,
                 "test only the formats that this checkpoint uses (default: every format)");
  add_device_option(app, options->device);
  app.add_option("-t,--threads", options->threads, "CPU threads (0: all usable cores)");
  app.footer(
      "Rows 1 to 256 of random data against a double reference; exit code 0 if all kernels pass.\n"
      "On a GPU: linear, router, embedding, norms, attention (BF16 and FP8 pages), sampling and "
      "the\n"
      "fused MoE layer, plain and compressed scales. On the CPU: products of every format in "
      "every\n"
      "instruction set of this machine, plain and compressed scales; the CPU's norms, attention "
      "and\n"
      "router are tested by the unit tests (make test).");
  return [options](std::ostream& out, std::ostream& err) {
    const Result<bool> passed = run(*options, out);
    if (!passed) return fail(err, "selftest", passed.error());
    return *passed ? 0 : 1;
  };
}

}  // namespace nibble::cli
