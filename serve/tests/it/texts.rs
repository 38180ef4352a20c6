//! OpenAI's API.

use crate::client::{get, measured, post, receive, send};
use crate::models::{config, folder, generated, runtimes, start, tract};
use moh_runtime::Model;
use moh_serve::{Config, Server};
use moh_tasks::generate::{GenerateOptions, LanguageModel, Prompts};
use moh_tasks::text::load_tokenizer;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;

const PROMPTS: [&str; 8] = [
    "ROMEO:\n",
    "JULIET:\nO",
    "First Citizen:\n",
    "KING RICHARD II:\nMy",
    "The",
    "QUEEN MARGARET:\nNow",
    "a",
    "What is the",
];

/// Prompts of unequal lengths.
fn prompts(count: usize) -> Vec<String> {
    (0..count).map(|i| PROMPTS[i % PROMPTS.len()].repeat(1 + i / 3 % 4)).collect()
}

fn complete(model: &str, prompt: &str, max_tokens: usize) -> Value {
    json!({ "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0 })
}

/// The text, reason and usage of a stream.
fn streamed(events: &[String]) -> (String, Value, Value) {
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]");
    let chunks: Vec<Value> = chunks.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
    let piece =
        |choice: &&Value| choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or("").to_owned();
    let finish = choices.iter().map(|choice| choice["finish_reason"].clone()).find(|reason| !reason.is_null());
    let usage = chunks.iter().map(|chunk| chunk["usage"].clone()).find(|usage| !usage.is_null());
    (choices.iter().map(piece).collect(), finish.unwrap_or_default(), usage.unwrap_or_default())
}

/// In every runtime, 16 streams at once are the texts of `generate`, one at a time.
#[test]
fn streams_that_share_steps_are_each_as_alone() {
    for runtime in runtimes() {
        let server = Server::start(&config(&["shared=llama"], runtime.clone())).unwrap();
        let (address, prompts) = (server.address(), prompts(16));
        let expected = generated("llama", &runtime, &prompts, 40);
        let answers: Vec<_> = std::thread::scope(|scope| {
            let ask = |(i, prompt): (usize, &String)| {
                let mut body = complete("shared", prompt, 40 - i % 5 * 7);
                body["stream"] = json!(true);
                scope.spawn(move || post(address, "/v1/completions", &body))
            };
            let threads: Vec<_> = prompts.iter().enumerate().map(ask).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let shorter = generated("llama", &runtime, &prompts, 12);
        for (i, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
            assert_eq!(answer.status, 200);
            assert_eq!(answer.header("content-type"), Some("text/event-stream"));
            let (text, finish, _) = streamed(&answer.events());
            assert!(
                expected.starts_with(&text) && text.starts_with(&shorter[i]),
                "{:?}: {text:?}, not {expected:?}",
                prompts[i]
            );
            if i % 5 == 0 {
                assert_eq!((&text, finish), (expected, json!("length")));
            }
        }
        // They did share steps.
        let rows = measured(address, &["moh_batch_rows_sum", "shared"]).unwrap();
        let steps = measured(address, &["moh_batch_rows_count", "shared"]).unwrap();
        assert!(rows > 1.5 * steps, "{rows} tokens in {steps} steps");
        server.stop();
    }
}

#[test]
fn models_without_a_cache_in_place_are_served_too() {
    let server = start(&["concat"]);
    let prompts = prompts(3);
    let expected = generated("concat", &tract(), &prompts, 20);
    std::thread::scope(|scope| {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            let (address, body) = (server.address(), complete("concat", prompt, 20));
            scope.spawn(move || {
                let answer = post(address, "/v1/completions", &body).json();
                assert_eq!(answer["choices"][0]["text"], *expected);
            });
        }
    });
    server.stop();
}

#[test]
fn several_instances_serve_one_queue() {
    let config = Config { instances: 2, ..config(&["llama"], tract()) };
    let server = Server::start(&config).unwrap();
    let (address, prompts) = (server.address(), prompts(6));
    let expected = generated("llama", &tract(), &prompts, 30);
    std::thread::scope(|scope| {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            scope.spawn(move || {
                let answer = post(address, "/v1/completions", &complete("llama", prompt, 30)).json();
                assert_eq!(answer["choices"][0]["text"], *expected);
            });
        }
    });
    server.stop();
}

#[test]
fn a_completion_tells_what_it_used_and_why_it_ended() {
    let server = start(&["llama"]);
    let address = server.address();
    let expected = &generated("llama", &tract(), &["ROMEO:\n".to_owned()], 60)[0];
    let answer = post(address, "/v1/completions", &complete("llama", "ROMEO:\n", 60));
    assert!(answer.header("x-request-id").is_some_and(|id| id.len() == 32));
    let answer = answer.json();
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["choices"][0]["text"], *expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        answer["usage"],
        json!({ "prompt_tokens": prompt_tokens, "completion_tokens": 60, "total_tokens": prompt_tokens + 60 })
    );

    // Without max_tokens: 16, as OpenAI has it.
    let short =
        post(address, "/v1/completions", &json!({ "model": "llama", "prompt": "ROMEO:\n", "temperature": 0 })).json();
    assert_eq!(short["usage"]["completion_tokens"], 16);

    // A stop text ends it before, whole or as a stream.
    let mut body = complete("llama", "ROMEO:\n", 60);
    body["stop"] = json!(["king", "nowhere"]);
    let before = expected.split("king").next().unwrap();
    let stopped = post(address, "/v1/completions", &body).json();
    assert_eq!(
        (&stopped["choices"][0]["text"], &stopped["choices"][0]["finish_reason"]),
        (&json!(before), &json!("stop"))
    );
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let (text, finish, usage) = streamed(&post(address, "/v1/completions", &body).events());
    assert_eq!((text.as_str(), finish), (before, json!("stop")));
    assert_eq!(usage, stopped["usage"]);
    // Null is what is usual, as in OpenAI's API.
    body["stop"] = json!(null);
    (body["stream"], body["ignore_eos"]) = (json!(null), json!(null));
    body["stream_options"] = json!({ "include_usage": null });
    assert_eq!(post(address, "/v1/completions", &body).json()["choices"][0]["text"], *expected);

    // Numbers of tokens in place of a text.
    let tokenizer = moh_tasks::text::load_tokenizer(&crate::models::folder().join("llama"), None).unwrap();
    let ids = tokenizer.encode("ROMEO:\n", true).unwrap();
    for prompt in [json!(ids), json!([ids]), json!(["ROMEO:\n"])] {
        body = json!({ "model": "llama", "prompt": prompt, "max_tokens": 60, "temperature": 0 });
        assert_eq!(post(address, "/v1/completions", &body).json()["choices"][0]["text"], *expected);
    }
    server.stop();
}

#[test]
fn a_seed_gives_the_same_text_again() {
    let server = start(&["llama"]);
    let text = |seed: Option<i64>| {
        let body = json!({ "model": "llama", "prompt": "ROMEO:\n", "max_tokens": 30, "seed": seed, "top_p": 0.95 });
        post(server.address(), "/v1/completions", &body).json()["choices"][0]["text"].clone()
    };
    assert_eq!(text(Some(7)), text(Some(7)));
    assert_ne!(text(Some(7)), text(Some(8)));
    assert_ne!(text(None), text(None));
    server.stop();
}

#[test]
fn chats_follow_the_models_template() {
    let server = start(&["chat", "llama"]);
    let address = server.address();
    let expected = &generated("llama", &tract(), &["JULIET:\nWho are you?\n\nROMEO:\n".to_owned()], 24)[0];
    let content = [json!("Who are you?"), json!([{ "type": "text", "text": "Who are you?" }])];
    for content in content {
        let mut body = json!({ "model": "chat", "messages": [{ "role": "juliet", "content": content }],
            "max_completion_tokens": 24, "temperature": 0 });
        let answer = post(address, "/v1/chat/completions", &body).json();
        assert_eq!(answer["object"], "chat.completion");
        assert_eq!(answer["choices"][0]["message"], json!({ "role": "assistant", "content": expected }));
        body["stream"] = json!(true);
        let events = post(address, "/v1/chat/completions", &body).events();
        let first: Value = serde_json::from_str(&events[0]).unwrap();
        assert_eq!(
            (&first["object"], &first["choices"][0]["delta"]["role"]),
            (&json!("chat.completion.chunk"), &json!("assistant"))
        );
        assert_eq!(streamed(&events).0, *expected);
    }
    let body = json!({ "model": "llama", "messages": [{ "role": "user", "content": "x" }] });
    let refused = post(address, "/v1/chat/completions", &body);
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("no chat template"), "{}", refused.text());
    let picture = json!({ "model": "chat", "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] });
    assert_eq!(post(address, "/v1/chat/completions", &picture).status, 400);
    assert_eq!(post(address, "/v1/chat/completions", &json!({ "model": "chat", "messages": [] })).status, 400);
    server.stop();
}

/// A model may have several tokens that end a text.
#[test]
fn each_end_of_text_ends_it() {
    let prompt = "ROMEO:\n";
    let of_llama = folder().join("llama");
    let mut model = LanguageModel::new(Model::load(&of_llama, &tract()).unwrap()).unwrap();
    let tokenizer = load_tokenizer(&of_llama, model.vocabulary()).unwrap();
    let ids = tokenizer.encode(prompt, true).unwrap().into_iter().map(i64::from).collect();
    let options = GenerateOptions { max_tokens: 12, ..GenerateOptions::default() };
    let prompts = Prompts::new(&[ids], 0).unwrap();
    let tokens = model.generate(&prompts, &options, |_| ControlFlow::Continue(())).unwrap().tokens.remove(0);
    // One that the model never chose, and its fifth.
    let never = (0..).find(|token| !tokens.contains(token)).unwrap();
    let ends = serde_json::json!({ "eos_token_id": [never, tokens[4]] });
    let at = tokens.iter().position(|token| *token == tokens[4]).unwrap();

    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&of_llama).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    std::fs::write(copy.path().join("generation_config.json"), ends.to_string()).unwrap();
    let mut config = config(&["ends=llama"], tract());
    config.models[0].path = copy.path().to_owned();
    let server = Server::start(&config).unwrap();
    let answer = post(server.address(), "/v1/completions", &complete("ends", prompt, 12)).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], at + 1);
    server.stop();
}

#[test]
fn bad_requests_are_told_what_is_wrong() {
    let server = start(&["llama", "digits"]);
    let address = server.address();
    let long = "ROMEO ".repeat(600);
    for (body, status, words) in [
        (json!({ "model": "nobody", "prompt": "x" }), 404, "there are: digits, llama"),
        (json!({ "model": "digits", "prompt": "x" }), 400, "/v2/models/digits/infer"),
        (json!({ "model": "llama", "prompt": "x", "suffix": "y" }), 400, "suffix: not supported"),
        (json!({ "model": "llama", "prompt": [5, 512] }), 400, "token 512: the model knows 512 tokens"),
        (json!({ "model": "llama", "prompt": [-1] }), 400, "token -1"),
        (json!({ "model": "llama", "prompt": long }), 400, "the model's longest sequence is 512"),
        (json!({ "model": "llama", "prompt": "x".repeat(40_000) }), 400, "expected at most 32768"),
        (json!({ "model": "llama", "prompt": "x", "max_tokens": 512 }), 400, "longest sequence is 512"),
        (json!({ "model": "llama", "prompt": "x", "max_tokens": 0 }), 400, "max_tokens"),
        (json!({ "model": "llama", "prompt": "x", "temperature": 3 }), 400, "temperature: expected 0 to 2"),
        (json!({ "model": "llama", "prompt": "x", "max_tokens": -1 }), 422, "body: max_tokens: invalid value"),
        (json!({ "model": "llama", "prompt": "x", "seed": 1.5 }), 422, "body: seed: invalid type"),
        (json!({ "model": "llama", "prompt": "x", "stream_options": 5 }), 422, "expected a JSON object"),
        (json!({ "model": "llama", "prompt": { "a": 1 } }), 422, "prompt: expected a text"),
        (json!({ "model": "llama", "prompt": "x", "stop": 5 }), 422, "stop: expected a text"),
        (json!({ "prompt": "x" }), 422, "missing field `model`"),
        (json!({ "model": "llama" }), 422, "missing field `prompt`"),
        (json!({ "model": "llama", "prompt": null }), 422, "prompt: expected a text"),
        (
            json!({ "model": "llama", "messages": [{ "role": "user", "content": "x" }] }),
            422,
            "expected prompt, found messages: chats go to /v1/chat/completions",
        ),
        (json!([1]), 422, "body: expected a JSON object, found an array"),
    ] {
        let answer = post(address, "/v1/completions", &body);
        assert_eq!(answer.status, status, "{}", answer.text());
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(words), "{message}");
        assert!(!message.contains("model.onnx"), "it tells where files are: {message}");
    }
    for body in ["", "{", "nothing", "\u{0}", "[[[[", "{\"model\": \"llama\", \"prompt\": \"\\ud800\"}"] {
        let answer = receive(send(address, "POST", "/v1/completions", &[], body.as_bytes()));
        assert!(answer.status == 400 || answer.status == 422, "{body}: {}", answer.text());
    }
    let deep = format!("{{\"model\": \"llama\", \"prompt\": {}", "[".repeat(100_000));
    assert_eq!(receive(send(address, "POST", "/v1/completions", &[], deep.as_bytes())).status, 400);
    // And after all of them it works.
    assert_eq!(post(address, "/v1/completions", &complete("llama", "x", 2)).status, 200);
    let models = get(address, "/v1/models").json();
    let names: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["llama"], "digits is no language model");
    assert_eq!(get(address, "/v1/models/digits").status, 400);
    assert_eq!(get(address, "/v1/models/llama").json()["id"], "llama");
    assert_eq!(get(address, "/v1/models/nobody").status, 404);
    server.stop();
}

/// Pieces come as they are generated, not at the end.
#[test]
fn a_stream_begins_before_it_ends() {
    let server = start(&["slow=llama"]);
    let mut body = complete("slow", "ROMEO:\n", 400);
    body["stream"] = json!(true);
    body["ignore_eos"] = json!(true);
    let stream = send(server.address(), "POST", "/v1/completions", &[], body.to_string().as_bytes());
    let mut lines = BufReader::new(stream).lines();
    let first = lines.find(|line| line.as_ref().unwrap().starts_with("data: ")).unwrap().unwrap();
    assert!(first.contains("\"text\""), "{first}");
    crate::limits::wait_for(server.address(), &["moh_slots_used", "slow"], 1.0);
    server.stop();
}
