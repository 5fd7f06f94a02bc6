// The kernel sets, one for each file that is compiled with the flags of an instruction set.
#pragma once
#include "tiles.hpp"

namespace dynaexq {

extern const TileSet kScalarTiles;
#if defined(__x86_64__)
extern const TileSet kAvx2Tiles;
extern const TileSet kAvxVnniTiles;
extern const TileSet kAvx512Tiles;
#elif defined(__aarch64__)
extern const TileSet kNeonTiles;
#endif

}  // namespace dynaexq
