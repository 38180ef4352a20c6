//! The Open Inference Protocol over REST.

use crate::client::{get, measured, post, receive, send};
use crate::models::{config, folder, limited, runtimes, start};
use moh_runtime::{Model, Tensor};
use moh_serve::Server;
use serde_json::{Value, json};
use std::time::Duration;

/// Numbers of a picture.
pub(crate) fn picture(number: usize) -> Vec<f32> {
    (0..3 * 64 * 64).map(|i| ((i * (number + 3)) % 17) as f32 / 8.0 - 1.0).collect()
}

/// What the runtime gives for a picture alone.
pub(crate) fn logits(runtime: &moh_runtime::Options, numbers: &[f32]) -> Vec<f32> {
    let mut model = Model::load(folder().join("digits"), runtime).unwrap();
    let pixels = Tensor::new([1, 3, 64, 64], numbers.to_vec()).unwrap();
    let pixels = pixels_as(&model, pixels);
    model.run([("pixel_values", pixels.into())]).unwrap()[0].data().unwrap().to_f32().unwrap()
}

/// The checkpoint's type is float16.
fn pixels_as(model: &Model, pixels: Tensor) -> Tensor {
    let numbers = pixels.as_slice::<f32>().unwrap().to_vec();
    Tensor::rounded("pixel_values", pixels.shape(), numbers, model.inputs()[0].element_type).unwrap()
}

/// The protocol's name of the type of the model's pictures, and the bytes of one.
pub(crate) fn encoded(numbers: &[f32]) -> (&'static str, Vec<u8>) {
    let model = Model::load(folder().join("digits"), &crate::models::tract()).unwrap();
    let tensor = pixels_as(&model, Tensor::new([numbers.len()], numbers.to_vec()).unwrap());
    let name = if tensor.element_type() == moh_runtime::ElementType::F16 { "FP16" } else { "FP32" };
    (name, tensor.data().to_bytes())
}

fn request(datatype: &str, numbers: &[f32]) -> Value {
    json!({ "id": "mine", "inputs": [{ "name": "pixel_values", "shape": [1, 3, 64, 64], "datatype": datatype, "data": numbers }] })
}

fn near(found: &Value, expected: &[f32]) -> bool {
    let found: Vec<f32> = found.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 2e-2 * b.abs().max(1.0))
}

#[test]
fn tensors_go_in_and_out_as_json_and_as_bytes() {
    for runtime in runtimes() {
        let server = Server::start(&config(&["digits"], runtime.clone())).unwrap();
        let (address, numbers) = (server.address(), picture(1));
        let expected = logits(&runtime, &numbers);
        let (datatype, bytes) = encoded(&numbers);
        let answer = post(address, "/v2/models/digits/infer", &request(datatype, &numbers)).json();
        assert_eq!(
            (&answer["model_name"], &answer["model_version"], &answer["id"]),
            (&json!("digits"), &json!("1"), &json!("mine"))
        );
        let output = &answer["outputs"][0];
        assert_eq!(
            (&output["name"], &output["shape"], &output["datatype"]),
            (&json!("logits"), &json!([1, 10]), &json!(datatype))
        );
        assert!(near(&output["data"], &expected), "{output}, expected {expected:?}");

        // As Triton's client sends it, and with the version in the path.
        let head = json!({ "inputs": [{ "name": "pixel_values", "shape": [1, 3, 64, 64], "datatype": datatype,
            "parameters": { "binary_data_size": bytes.len() } }], "outputs": [{ "name": "logits", "parameters": { "binary_data": true } }] });
        let head = head.to_string();
        let length = head.len().to_string();
        let body = [head.as_bytes(), &bytes].concat();
        let headers = [("inference-header-content-length", length.as_str())];
        let answer = receive(send(address, "POST", "/v2/models/digits/versions/1/infer", &headers, &body));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let split: usize = answer.header("inference-header-content-length").unwrap().parse().unwrap();
        let (json, raw) = answer.body.split_at(split);
        let json: Value = serde_json::from_slice(json).unwrap();
        assert_eq!(json["outputs"][0]["parameters"]["binary_data_size"], raw.len());
        let ty = moh_runtime::ElementType::ALL.iter().find(|ty| ty.size() * 10 == raw.len()).unwrap();
        let ty = if datatype == "FP16" { moh_runtime::ElementType::F16 } else { *ty };
        let found = ty.read(raw).unwrap().as_data().to_f32().unwrap();
        assert!(near(&json!(found), &expected), "{found:?}");
        // Where bytes are asked for, an output may still be asked for as numbers.
        let mut body = request(datatype, &numbers);
        body["parameters"] = json!({ "binary_data_output": true });
        body["outputs"] = json!([{ "name": "logits", "parameters": { "binary_data": false } }]);
        let answer = post(address, "/v2/models/digits/infer", &body);
        assert!(near(&answer.json()["outputs"][0]["data"], &expected), "{}", answer.text());
        server.stop();
    }
}

/// Requests of many clients share runs, and each gets its own numbers.
#[test]
fn pictures_are_batched_and_each_gets_its_own_logits() {
    let server = limited(&["batched=digits"], |limits| limits.window = Duration::from_millis(200));
    let address = server.address();
    let (runtime, datatype) = (crate::models::tract(), encoded(&[0.0]).0);
    std::thread::scope(|scope| {
        for number in 0..12 {
            let runtime = &runtime;
            scope.spawn(move || {
                let numbers = picture(number);
                let answer = post(address, "/v2/models/batched/infer", &request(datatype, &numbers)).json();
                assert!(near(&answer["outputs"][0]["data"], &logits(runtime, &numbers)), "{number}: {answer}");
            });
        }
    });
    let runs = measured(address, &["moh_batch_rows_count", "batched"]).unwrap();
    assert_eq!(measured(address, &["moh_batch_rows_sum", "batched"]), Some(12.0));
    assert!(runs < 12.0, "{runs} runs");
    server.stop();
}

/// A language model is served on tensors, too, beside its texts.
#[test]
fn language_models_run_on_tensors() {
    let server = start(&["llama"]);
    let metadata = get(server.address(), "/v2/models/llama").json();
    let inputs: Vec<Value> = metadata["inputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|input| {
            let name = input["name"].as_str().unwrap();
            let (shape, data) = match name {
                "input_ids" => (vec![1, 3], vec![52, 49, 47]),
                "attention_mask" => (vec![1, 3], vec![1, 1, 1]),
                "position_ids" => (vec![1, 3], vec![0, 1, 2]),
                _ => (vec![1, input["shape"][1].as_i64().unwrap(), 0, input["shape"][3].as_i64().unwrap()], vec![]),
            };
            json!({ "name": name, "datatype": input["datatype"], "shape": shape, "data": data })
        })
        .collect();
    let mut body = json!({ "inputs": &inputs, "outputs": [{ "name": "logits" }] });
    let answer = post(server.address(), "/v2/models/llama/infer", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["outputs"][0]["shape"], json!([1, 3, 512]));
    assert_eq!(answer.json()["outputs"].as_array().unwrap().len(), 1);
    // A token that the model does not know.
    let ids = inputs.iter().position(|input| input["name"] == "input_ids").unwrap();
    let good = body.clone();
    body["inputs"][ids]["data"] = json!([52, 49, 100_000]);
    let answer = post(server.address(), "/v2/models/llama/infer", &body);
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("input input_ids: expected numbers below 512, found 100000"), "{}", answer.text());
    // What is optional may be null.
    body = good;
    (body["id"], body["parameters"], body["outputs"]) = (Value::Null, Value::Null, Value::Null);
    body["inputs"][ids]["parameters"] = Value::Null;
    assert_eq!(post(server.address(), "/v2/models/llama/infer", &body).status, 200);
    server.stop();
}

#[test]
fn bad_tensors_are_told_what_is_wrong() {
    let server = start(&["digits"]);
    let (address, (datatype, bytes)) = (server.address(), encoded(&picture(0)));
    let good = request(datatype, &picture(0));
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut body = good.clone();
        change(&mut body);
        body
    };
    for (body, status, words) in [
        (changed(&|b| b["inputs"][0]["name"] = json!("x")), 400, "input x: the model takes pixel_values"),
        (changed(&|b| b["inputs"] = json!([])), 400, "input pixel_values: it is missing"),
        (changed(&|b| b["inputs"][0]["datatype"] = json!("INT64")), 400, "is not a valid INT64"),
        (changed(&|b| b["inputs"][0]["datatype"] = json!("BYTES")), 400, "expected a datatype of BOOL"),
        (changed(&|b| b["inputs"][0]["shape"] = json!([1, 3, 64])), 400, "expected 192 numbers"),
        (changed(&|b| b["inputs"][0]["shape"] = json!([3, 1, 64, 64])), 400, "input pixel_values: expected shape"),
        (changed(&|b| b["inputs"][0]["shape"] = json!([-1, 3, 64, 64])), 400, "is not a valid shape"),
        (
            changed(&|b| b["inputs"][0]["shape"] = json!([9_000_000_000_000_000_000u64, 3, 64, 64])),
            400,
            "is not a valid shape",
        ),
        (changed(&|b| b["inputs"][0]["data"] = json!("x")), 400, "\"x\" is not a valid FP"),
        (changed(&|b| b["inputs"][0]["data"] = Value::Null), 422, "expected data"),
        (changed(&|b| b["outputs"] = json!([{ "name": "y" }])), 400, "output y: the model gives logits"),
        (
            changed(&|b| b["outputs"] = json!([{ "name": "logits", "parameters": { "classification": 3 } }])),
            400,
            "output logits: parameters.classification: not supported here; expected none, found 3",
        ),
        (changed(&|b| b["parameters"] = json!({ "sequence_id": "s" })), 400, "parameters.sequence_id: not supported"),
        (
            changed(&|b| b["inputs"][0]["parameters"] = json!({ "shared_memory_region": "r" })),
            400,
            "input pixel_values: parameters.shared_memory_region: not supported",
        ),
        (
            changed(&|b| b["inputs"][0]["parameters"] = json!({ "binary_data_size": 8 })),
            400,
            "expected 8 bytes after the JSON",
        ),
        (changed(&|b| b["inputs"][0]["shape"] = json!([1, "3"])), 422, "body: inputs[0].shape[1]: invalid type"),
        (json!(["mine", null, [], null]), 422, "expected a JSON object, found an array"),
        (json!({}), 422, "missing field `inputs`"),
    ] {
        let answer = post(address, "/v2/models/digits/infer", &body);
        assert_eq!(answer.status, status, "{}", answer.text());
        let message = answer.json()["error"].as_str().unwrap().to_owned();
        assert!(message.contains(words), "{message}");
    }
    let rows = json!({ "inputs": [{ "name": "pixel_values", "shape": [33, 3, 64, 64], "datatype": datatype,
        "parameters": { "binary_data_size": bytes.len() * 33 } }] })
    .to_string();
    let length = rows.len().to_string();
    for (length, body, words) in [
        (length.as_str(), [rows.as_bytes(), &bytes.repeat(33)].concat(), "expected at most 32 (--batch) on axis 0"),
        (length.as_str(), [rows.as_bytes(), &bytes].concat(), "bytes after the JSON"),
        ("9999999999", rows.clone().into_bytes(), "bytes of JSON, in a body of"),
        ("-1", rows.clone().into_bytes(), "expected a number of bytes"),
    ] {
        let headers = [("inference-header-content-length", length)];
        let answer = receive(send(address, "POST", "/v2/models/digits/infer", &headers, &body));
        assert!(answer.status == 400 && answer.text().contains(words), "{}", answer.text());
    }
    assert_eq!(post(address, "/v2/models/nobody/infer", &good).status, 404);
    assert_eq!(post(address, "/v2/models/digits/versions/2/infer", &good).status, 404);
    assert_eq!(post(address, "/v2/models/digits/infer", &good).status, 200);
    // What changes nothing is no reason to refuse.
    let usual = changed(&|b| {
        b["parameters"] = json!({ "sequence_id": 0, "priority": 1, "mine": "x" });
        b["outputs"] =
            json!([{ "name": "logits", "parameters": { "classification": 0, "shared_memory_region": null } }]);
    });
    assert_eq!(post(address, "/v2/models/digits/infer", &usual).status, 200);
    server.stop();
}
