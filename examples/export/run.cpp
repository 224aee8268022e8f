// run FOLDER: pack a weight of a safetensors checkpoint on the GPU, and run the product for 1, 16 and 300 tokens.
//
// `python examples/13_export_to_c.py FOLDER` writes FOLDER. Exits 1 if a bit of a result differs, 2 if something fails.
#include "cuda_driver.h"
#include "sparse24.hpp"

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

using Bytes = std::vector<char>;

static Bytes read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + ": can't be read");
    return Bytes(std::istreambuf_iterator<char>(file), {});
}

// The bytes of a tensor. A safetensors file is the size of its header, the header as JSON, and the data.
static Bytes tensor(const Bytes &file, const std::string &name) {
    unsigned long long size = 0, begin = 0, end = 0;
    if (file.size() >= 8) std::memcpy(&size, file.data(), 8);
    if (file.size() < 8 || size > file.size() - 8) throw std::runtime_error("safetensors: expected a header, got a shorter file");
    const std::string header(file.data() + 8, size), key = "\"data_offsets\"";
    const auto entry = header.find("\"" + name + "\"");
    const auto at = entry == std::string::npos ? entry : header.find(key, entry);
    if (at == std::string::npos) throw std::runtime_error(name + ": not in the file");
    if (std::sscanf(header.c_str() + at + key.size(), " : [ %llu , %llu ]", &begin, &end) != 2 || begin > end || end > file.size() - 8 - size)
        throw std::runtime_error(name + ": expected bytes inside of the file");
    const auto data = file.begin() + 8 + static_cast<std::ptrdiff_t>(size);
    return Bytes(data + static_cast<std::ptrdiff_t>(begin), data + static_cast<std::ptrdiff_t>(end));
}

// Memory of the GPU.
class Buffer {
  public:
    explicit Buffer(std::size_t size) : size_(size) {
        if (size) CUDA(cuMemAlloc_v2(&address_, size));
        if (size) CUDA(cuMemsetD8_v2(address_, 0xff, size));
    }
    explicit Buffer(const Bytes &content) : Buffer(content.size()) { CUDA(cuMemcpyHtoD_v2(address_, content.data(), content.size())); }
    Buffer(const Buffer &) = delete;
    ~Buffer() {
        if (address_) cuMemFree_v2(address_);
    }
    std::uint64_t address() const { return address_; }
    sparse24::Workspace workspace() const { return {address_, size_}; }
    Bytes content() const {
        Bytes found(size_);
        CUDA(cuMemcpyDtoH_v2(found.data(), address_, size_));
        return found;
    }

  private:
    std::uint64_t address_ = 0;
    std::size_t size_;
};

static bool run(const std::string &folder, void *stream) {
    const std::string problem = "gemm_sparse24_forward-f16-256x512", pack_problem = "pack_sparse24-f16-256x512";
    const sparse24::Library library(folder + "/plans");

    const Bytes checkpoint = read_file(folder + "/weight.safetensors"), expected_weight = read_file(folder + "/weight.packed");
    const Buffer values(tensor(checkpoint, "layer.values24")), metadata(tensor(checkpoint, "layer.meta24"));
    const Buffer weight(expected_weight.size());
    const sparse24::Plan pack = library.find(pack_problem);
    const Buffer scratch(pack.workspace_size());
    pack.run({{"weight.values", values.address()}, {"weight.metadata", metadata.address()}, {"packed", weight.address()}},
             scratch.workspace(), stream);
    CUDA(cuStreamSynchronize(stream));
    bool same = weight.content() == expected_weight;

    for (const int n : {1, 16, 300}) {
        const Buffer x(read_file(folder + "/x." + std::to_string(n)));
        const Bytes expected = read_file(folder + "/y." + std::to_string(n));
        const Buffer y(expected.size());
        const sparse24::Plan plan = library.find(problem, n);
        const Buffer workspace(plan.workspace_size());
        plan.run({{"weight", weight.address()}, {"x", x.address(), 512}, {"y", y.address(), 256}}, workspace.workspace(), stream);
        CUDA(cuStreamSynchronize(stream));
        const bool equal = y.content() == expected;
        std::cout << n << " tokens by " << plan.kernel() << ": " << (equal ? "as expected" : "DIFFERENT") << "\n";
        same = same && equal;
    }
    return same;
}

int main(int count, char **arguments) {
    void *context, *stream;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, 0));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&stream, 0)); // It waits for the copies, which run on the default stream, and they for it.
    int code = 2;
    try {
        if (count != 2) throw std::runtime_error("usage: run FOLDER");
        code = run(arguments[1], stream) ? 0 : 1;
    } catch (const std::exception &error) {
        std::cerr << error.what() << "\n";
    }
    CUDA(cuStreamDestroy_v2(stream));
    CUDA(cuDevicePrimaryCtxRelease_v2(0));
    return code;
}
