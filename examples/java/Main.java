// Continues a prompt of token ids with an exported language model, in onnxruntime's Java API.
//
// usage: java -cp onnxruntime.jar Main.java MODEL.onnx LIBRARY COUNT TOKEN...    LIBRARY: libmoh_ops.so, or "" to run without it
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.LongStream;

class Main {
    // An int64 tensor (1, length).
    static OnnxTensor row(OrtEnvironment environment, long[] numbers) throws OrtException {
        return OnnxTensor.createTensor(environment, LongBuffer.wrap(numbers), new long[] {1, numbers.length});
    }

    // The most probable token after the last one: logits are (batch, sequence, vocabulary).
    static long next(OnnxTensor logits) {
        long[] shape = logits.getInfo().getShape();
        int vocabulary = (int) shape[2], start = (int) (shape[1] - 1) * vocabulary, best = 0;
        FloatBuffer values = logits.getFloatBuffer();
        for (int i = 1; i < vocabulary; i++) {
            if (values.get(start + i) > values.get(start + best)) best = i;
        }
        return best;
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments.length < 4) {
            System.err.println("usage: Main MODEL.onnx LIBRARY COUNT TOKEN...");
            System.exit(2);
        }
        long[] prompt = LongStream.range(3, arguments.length).map(i -> Long.parseLong(arguments[(int) i])).toArray();
        OrtEnvironment environment = OrtEnvironment.getEnvironment();
        try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
            if (!arguments[1].isEmpty()) options.registerCustomOpLibrary(arguments[1]);
            try (OrtSession session = environment.createSession(arguments[0], options)) {
                generate(environment, session, prompt, Integer.parseInt(arguments[2]));
            }
        }
    }

    static void generate(OrtEnvironment environment, OrtSession session, long[] tokens, int count) throws Exception {
        // Inputs: input_ids, attention_mask, position_ids, caches. Outputs: logits, and the caches in the same order.
        List<String> inputs = new ArrayList<>(session.getInputNames());
        Map<String, OnnxTensor> feeds = new HashMap<>();
        // Caches (batch, heads, past, head size) are empty at first.
        for (String name : inputs.subList(3, inputs.size())) {
            long[] shape = ((TensorInfo) session.getInputInfo().get(name).getInfo()).getShape();
            shape[0] = 1;
            shape[2] = 0;
            feeds.put(name, OnnxTensor.createTensor(environment, FloatBuffer.allocate(0), shape));
        }

        // Tensors are native memory, which the garbage collector does not free. Who closes the caches: these first ones we, later ones
        // the results that hold them.
        List<OnnxTensor> empty = new ArrayList<>(feeds.values());
        AutoCloseable owner = () -> empty.forEach(OnnxTensor::close);
        int past = 0;
        try {
            for (int n = 0; n < count; n++) {
                long[] mask = LongStream.range(0, past + tokens.length).map(i -> 1).toArray();
                long[] positions = LongStream.range(past, past + tokens.length).toArray();
                OrtSession.Result results;
                try (OnnxTensor ids = row(environment, tokens);
                        OnnxTensor seen = row(environment, mask);
                        OnnxTensor places = row(environment, positions)) {
                    feeds.put("input_ids", ids);
                    feeds.put("attention_mask", seen);
                    feeds.put("position_ids", places);
                    results = session.run(feeds);
                }
                owner.close();
                owner = results;
                for (int i = 3; i < inputs.size(); i++) feeds.put(inputs.get(i), (OnnxTensor) results.get(i - 2));
                past += tokens.length;

                tokens = new long[] {next((OnnxTensor) results.get(0))};
                System.out.print(tokens[0] + (n + 1 < count ? " " : "\n"));
            }
        } finally {
            owner.close();
        }
    }
}
