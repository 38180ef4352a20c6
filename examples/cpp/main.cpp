// Continues a prompt of token ids with an exported language model, in onnxruntime's C++ API.
//
// usage: main MODEL.onnx LIBRARY COUNT TOKEN...    LIBRARY: libmoh_ops.so, or "" to run without it
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iostream>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

// An int64 tensor (1, length) over memory that stays the caller's.
static Ort::Value row(std::vector<int64_t> &numbers) {
    static const auto memory = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
    const int64_t shape[] = {1, static_cast<int64_t>(numbers.size())};
    return Ort::Value::CreateTensor<int64_t>(memory, numbers.data(), numbers.size(), shape, 2);
}

static std::vector<const char *> pointers(const std::vector<std::string> &names) {
    std::vector<const char *> pointers;
    for (const auto &name : names) pointers.push_back(name.c_str());
    return pointers;
}

int main(int argc, char **argv) try {
    if (argc < 5) {
        std::cerr << "usage: main MODEL.onnx LIBRARY COUNT TOKEN...\n";
        return 2;
    }
    Ort::Env env;
    Ort::SessionOptions options;
    if (*argv[2]) options.RegisterCustomOpsLibrary(argv[2]);
    Ort::Session session(env, argv[1], options);

    // Inputs: input_ids, attention_mask, position_ids, caches. Outputs: logits, and the caches in the same order.
    Ort::AllocatorWithDefaultOptions allocator;
    std::vector<std::string> inputs, outputs;
    for (size_t i = 0; i < session.GetInputCount(); i++)
        inputs.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    for (size_t i = 0; i < session.GetOutputCount(); i++)
        outputs.emplace_back(session.GetOutputNameAllocated(i, allocator).get());
    const auto input_names = pointers(inputs), output_names = pointers(outputs);

    // Caches (batch, heads, past, head size) are empty at first.
    std::vector<Ort::Value> caches;
    for (size_t i = 3; i < inputs.size(); i++) {
        auto shape = session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo().GetShape();
        shape[0] = 1, shape[2] = 0;
        caches.push_back(Ort::Value::CreateTensor<float>(allocator, shape.data(), shape.size()));
    }

    std::vector<int64_t> tokens, mask;
    for (int i = 4; i < argc; i++) tokens.push_back(std::stoll(argv[i]));
    for (int n = std::stoi(argv[3]); n > 0; n--) {
        std::vector<int64_t> positions(tokens.size());
        std::iota(positions.begin(), positions.end(), static_cast<int64_t>(mask.size()));
        mask.insert(mask.end(), tokens.size(), 1);

        std::vector<Ort::Value> feeds;
        feeds.push_back(row(tokens));
        feeds.push_back(row(mask));
        feeds.push_back(row(positions));
        std::move(caches.begin(), caches.end(), std::back_inserter(feeds));
        auto results = session.Run(Ort::RunOptions{}, input_names.data(), feeds.data(), feeds.size(),
                                   output_names.data(), output_names.size());

        // Logits (batch, sequence, vocabulary): the most probable token after the last one.
        const auto shape = results[0].GetTensorTypeAndShapeInfo().GetShape();
        const float *last = results[0].GetTensorData<float>() + (shape[1] - 1) * shape[2];
        tokens = {std::max_element(last, last + shape[2]) - last};
        std::cout << tokens[0] << (n > 1 ? ' ' : '\n') << std::flush;
        caches.assign(std::make_move_iterator(results.begin() + 1), std::make_move_iterator(results.end()));
    }
} catch (const std::exception &error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
}
