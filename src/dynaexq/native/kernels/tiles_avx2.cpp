#include "instruction_sets.hpp"
#include "isa_avx2.hpp"
#include "tiles_body.hpp"

namespace dynaexq {

extern const TileSet kAvx2Tiles = make_tiles<Avx2>("avx2");

}  // namespace dynaexq
