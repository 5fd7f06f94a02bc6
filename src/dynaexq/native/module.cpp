// Python bindings. Every call that reads, copies or hashes runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <system_error>

#include "checksum.hpp"
#include "fitting.hpp"
#include "handles.hpp"
#include "io.hpp"
#include "kernels/bindings.hpp"

namespace nb = nanobind;
using namespace dynaexq;

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

namespace {

// Reads destination.size bytes and returns (bytes that arrived, their CRC-32C).
std::pair<std::size_t, std::uint32_t> read_extent(int fd, std::uint64_t offset, MutableBytes destination) {
  void* out = destination.data();
  const std::size_t size = destination.size();
  nb::gil_scoped_release unlocked;
  const std::size_t done = read_exactly(fd, offset, out, size);
  return {done, crc32c(out, done)};
}

std::uint32_t checksum(Bytes data, std::uint32_t crc) {
  const void* bytes = data.data();
  const std::size_t size = data.size();
  nb::gil_scoped_release unlocked;
  return crc32c(bytes, size, crc);
}

std::uint32_t checksum_portable(Bytes data, std::uint32_t crc) {
  return crc32c_portable(data.data(), data.size(), crc);
}

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

void choose_codes_at(int rows, int columns, std::uintptr_t left, std::uintptr_t upper, std::ptrdiff_t upper_stride,
                     std::uintptr_t scale, std::uintptr_t offset, std::uintptr_t lowest, int reach,
                     std::uintptr_t codes, std::uintptr_t errors, int threads) {
  const GroupFit group{rows, columns, floats(left), floats(upper), upper_stride, floats(scale), floats(offset),
                       reinterpret_cast<const std::uint8_t*>(lowest), reach,
                       reinterpret_cast<std::uint8_t*>(codes), floats(errors)};
  nb::gil_scoped_release unlocked;
  choose_codes(group, threads);
}

std::size_t pin(HandleTable& table, Words out) {
  if (out.size() != table.size()) throw std::out_of_range("the window buffer has another size than the table");
  std::uint64_t* words = out.data();
  nb::gil_scoped_release unlocked;
  return table.pin(words);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // threads that serve until the process ends hold tables then
  nb::register_exception_translator(
      [](const std::exception_ptr& raised, void*) {
        try {
          std::rethrow_exception(raised);
        } catch (const std::system_error& error) {
          errno = error.code().value();
          PyErr_SetFromErrno(PyExc_OSError);
        }
      });

  nb::class_<HandleTable>(m, "HandleTable")
      .def(nb::init<std::size_t>(), nb::arg("size"))
      .def("__len__", &HandleTable::size)
      .def("load", &HandleTable::load, nb::arg("index"))
      .def("publish", &HandleTable::publish, nb::arg("index"), nb::arg("word"))
      .def("pin", &pin, nb::arg("out"))
      .def("release", &HandleTable::release, nb::arg("slot"))
      .def("drained", &HandleTable::drained, nb::arg("epoch"))
      .def("live_windows", &HandleTable::live_windows);

  m.def("read_extent", &read_extent, nb::arg("fd"), nb::arg("offset"), nb::arg("destination"));
  m.def("crc32c", &checksum, nb::arg("data"), nb::arg("crc") = 0);
  m.def("crc32c_portable", &checksum_portable, nb::arg("data"), nb::arg("crc") = 0);
  m.def("limit_malloc", &limit_malloc);
  m.def("choose_codes", &choose_codes_at, nb::arg("rows"), nb::arg("columns"), nb::arg("left"), nb::arg("upper"),
        nb::arg("upper_stride"), nb::arg("scale"), nb::arg("offset"), nb::arg("lowest"), nb::arg("reach"),
        nb::arg("codes"), nb::arg("errors"), nb::arg("threads"));
  bind_kernels(m);
}
