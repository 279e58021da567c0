// The scale planes of one experts module: encoded together, then kept or compressed by policy.
// Not for other folders.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "codec/csf.h"
#include "load/convert_scales.h"
#include "load/scale_planes.h"

namespace nibble::load {

/// Which planes may be compressed, by experts module.
struct ScalesSelection {
  struct Module {
    std::string name;  // "model.layers.3.mlp.experts"
    std::vector<const QuantizedModule*> planes;
  };
  std::vector<Module> modules;
  std::string family;  // of a manifest
};

/// Experts of the ModelOpt NVFP4 dialect. Errors: kUnsupported if there is none.
Result<ScalesSelection> select_modelopt(const std::vector<QuantizedModule>& modules);
/// Experts of a manifest's family (an empty name picks one); layers from `layers` on (MTP) are left
/// out if `layers` > 0, as are planes of another type than the first. Errors: kInvalidArgument for
/// an unknown family, kUnsupported if no name fits.
Result<ScalesSelection> select_manifest(const std::vector<QuantizedModule>& modules,
                                        const std::string& family, int64_t layers);

/// What became of one module.
struct EncodedModule {
  std::map<std::string, codec::CsfPlane> streams;  // by scale name; those to be written
  std::vector<ScalesReport::Group> groups;
};
/// Reads and encodes every plane on the pool, then decides: by projection, or (whole_module) for
/// all together, and then only if gate and up of every expert have bit-equal global scales.
Result<EncodedModule> encode_module(const checkpoint::CheckpointIndex& index,
                                    const ScalesSelection::Module& module, bool whole_module,
                                    ThreadPool& pool);

}  // namespace nibble::load
