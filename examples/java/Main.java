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

    public static void main(String[] arguments) throws OrtException {
        if (arguments.length < 4) {
            System.err.println("usage: Main MODEL.onnx LIBRARY COUNT TOKEN...");
            System.exit(2);
        }
        OrtEnvironment environment = OrtEnvironment.getEnvironment();
        OrtSession.SessionOptions options = new OrtSession.SessionOptions();
        if (!arguments[1].isEmpty()) options.registerCustomOpLibrary(arguments[1]);
        OrtSession session = environment.createSession(arguments[0], options);

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

        int count = Integer.parseInt(arguments[2]), past = 0;
        long[] tokens = LongStream.range(3, arguments.length).map(i -> Long.parseLong(arguments[(int) i])).toArray();
        OrtSession.Result before = null;
        for (int n = 0; n < count; n++) {
            feeds.put("input_ids", row(environment, tokens));
            feeds.put("attention_mask", row(environment, LongStream.range(0, past + tokens.length).map(i -> 1).toArray()));
            feeds.put("position_ids", row(environment, LongStream.range(past, past + tokens.length).toArray()));
            OrtSession.Result results = session.run(feeds);
            past += tokens.length;

            tokens = new long[] {next((OnnxTensor) results.get(0))};
            System.out.print(tokens[0] + (n + 1 < count ? " " : "\n"));
            for (int i = 3; i < inputs.size(); i++) feeds.put(inputs.get(i), (OnnxTensor) results.get(i - 2));
            // Results own the tensors that they hold: those of the last call were this call's caches.
            if (before != null) before.close();
            before = results;
        }
    }
}
