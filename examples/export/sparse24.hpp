// Exported plans as C++ classes: operands by their names, and exceptions.
#pragma once

#include "sparse24_export.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>

namespace sparse24 {

struct Error : std::runtime_error {
    explicit Error(const s24_error &error) : std::runtime_error(error.text), code(error.code) {}
    int code; // S24_INVALID and others
};

struct Operand {
    const char *name;
    std::uint64_t address;
    std::int64_t stride = 0; // elements from one line to the next, where lines may lie apart
};

struct Workspace {
    std::uint64_t address = 0, nbytes = 0;
};

// A plan is valid as long as its Library lives. Copy it freely.
class Plan {
  public:
    explicit Plan(const s24_plan &plan) : plan_(plan) {}
    std::uint64_t workspace_size() const { return s24_workspace(&plan_, nullptr); }
    std::string kernel() const { return s24_guarantee(&plan_).kernel; }

    // Enqueue on a CUstream. An operand that isn't named is absent. Takes no memory.
    void run(std::initializer_list<Operand> given, Workspace workspace, void *stream) const {
        std::array<s24_operand, 32> operands{};
        for (const Operand &one : given) operands.at(index(one.name)) = {one.address, one.stride};
        s24_error error;
        if (s24_run(&plan_, operands.data(), workspace.address, workspace.nbytes, stream, &error)) throw Error(error);
    }

  private:
    std::uint32_t index(const char *name) const {
        for (std::uint32_t i = 0; i < s24_operand_count(&plan_); i++)
            if (!std::strcmp(s24_operand_name(&plan_, i), name)) return i;
        throw std::invalid_argument(std::string("operand: the plan has none called ") + name);
    }
    s24_plan plan_;
};

class Library {
  public:
    explicit Library(const std::string &folder) {
        s24_library *opened;
        s24_error error;
        if (s24_open(folder.c_str(), &opened, &error)) throw Error(error);
        library_.reset(opened);
    }
    Plan find(const std::string &problem, std::int64_t n = 0) const {
        s24_plan plan;
        s24_error error;
        if (s24_find(library_.get(), problem.c_str(), n, &plan, &error)) throw Error(error);
        return Plan(plan);
    }

  private:
    struct Close {
        void operator()(s24_library *library) const { s24_close(library); }
    };
    std::unique_ptr<s24_library, Close> library_;
};

} // namespace sparse24
