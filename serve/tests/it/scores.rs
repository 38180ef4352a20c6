//! OpenAI's API: how probable tokens are, and several texts at once.

use crate::client::{get, post};
use crate::models::{config, folder, generated, limited, locked, runtimes, start, tract};
use moh_runtime::{Model, Options};
use moh_serve::{Config, Limits, Server};
use moh_tasks::generate::{LanguageModel, Prompts};
use moh_tasks::text::{Tokenizer, load_tokenizer};
use serde_json::{Value, json};

const PROMPT: &str = "KING RICHARD II:\nMy lord, what is the news?\n";

fn tokenizer() -> Tokenizer {
    load_tokenizer(&folder().join("llama"), None).unwrap()
}

/// The logarithms of all probabilities after each of these tokens, which the model reads at once.
fn logprobs(runtime: &Options, ids: &[u32]) -> Vec<Vec<f64>> {
    let mut model = LanguageModel::new(Model::load(folder().join("llama"), runtime).unwrap()).unwrap();
    let at = model.model().outputs().iter().position(|output| output.name == "logits").unwrap();
    let prompts = Prompts::new(&[ids.iter().map(|&id| i64::from(id)).collect()], 0).unwrap();
    let logits = model.outputs(&prompts).unwrap().swap_remove(at);
    let row = |row: &[f32]| {
        let total = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        row.iter().map(|&logit| f64::from(logit) - total).collect()
    };
    logits.as_slice::<f32>().unwrap().chunks(512).map(row).collect()
}

fn near(found: &Value, expected: f64) {
    assert!((found.as_f64().unwrap() - expected).abs() < 1e-3, "{found}, expected {expected}");
}

/// As lm-evaluation-harness asks: tokens, of which nothing but the probabilities is wanted.
#[test]
fn prompts_are_scored_as_the_model_gives_them_at_once() {
    let (tokenizer, texts) = (tokenizer(), [PROMPT, "ROMEO:\nO", "The"]);
    let ids: Vec<Vec<u32>> = texts.iter().map(|text| tokenizer.encode(text, true).unwrap()).collect();
    for runtime in runtimes() {
        // Prompts are read in parts of seven tokens.
        let limits = Limits { prefill: 7, ..Limits::default() };
        let server = Server::start(&Config { limits, ..config(&["llama"], runtime.clone()) }).unwrap();
        for (prompt, most) in [(json!(ids), 1), (json!(texts), 0)] {
            let body = json!({ "model": "llama", "prompt": prompt, "max_tokens": most, "temperature": 0, "logprobs": 3,
                "echo": true, "seed": 1234 });
            let answer = post(server.address(), "/v1/completions", &body).json();
            let choices = answer["choices"].as_array().unwrap();
            assert_eq!(choices.len(), 3, "{answer}");
            assert_eq!(answer["usage"]["completion_tokens"], 3 * most);
            assert_eq!(answer["usage"]["prompt_tokens"], ids.iter().map(Vec::len).sum::<usize>());
            for (i, (choice, ids)) in choices.iter().zip(&ids).enumerate() {
                assert_eq!(choice["index"], i);
                let expected = logprobs(&runtime, ids);
                let told = &choice["logprobs"];
                let [tokens, found, top, offsets] = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
                    .map(|field| told[field].as_array().unwrap());
                assert!([tokens, found, top, offsets].iter().all(|list| list.len() == ids.len() + most), "{told}");
                // Nothing comes before the first one.
                assert!(found[0].is_null() && top[0].is_null());
                for at in 1..ids.len() {
                    let row = &expected[at - 1];
                    near(&found[at], row[ids[at] as usize]);
                    let mut best: Vec<f64> = row.clone();
                    best.sort_by(|a, b| b.total_cmp(a));
                    let mut told: Vec<f64> =
                        top[at].as_object().unwrap().values().map(|logprob| logprob.as_f64().unwrap()).collect();
                    told.sort_by(|a, b| b.total_cmp(a));
                    assert!((3..5).contains(&told.len()), "{told:?}");
                    told.iter().take(3).zip(&best).for_each(|(found, best)| near(&json!(found), *best));
                    // As clients tell whether it was the most probable one.
                    assert!(top[at][tokens[at].as_str().unwrap()] == found[at], "{told:?}");
                }
                let text = choice["text"].as_str().unwrap();
                assert!(text.starts_with(texts[i]), "{text:?}");
                assert_eq!(tokens.iter().map(|token| token.as_str().unwrap()).collect::<String>(), text);
                let mut characters = 0;
                for (token, offset) in tokens.iter().zip(offsets) {
                    assert_eq!(*offset, characters);
                    characters += token.as_str().unwrap().chars().count();
                }
                if most == 1 {
                    let greatest = expected[ids.len() - 1].iter().copied().fold(f64::MIN, f64::max);
                    near(&found[ids.len()], greatest);
                }
            }
        }
        server.stop();
    }
}

/// Of a text that goes on, each token has the probability that a model that reads all of it at once gives it; whole or streamed.
#[test]
fn generated_tokens_are_scored() {
    let server = start(&["llama", "chat"]);
    let (tokenizer, address) = (tokenizer(), server.address());
    let mut body =
        json!({ "model": "llama", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.9, "seed": 5, "logprobs": 2 });
    let choice = post(address, "/v1/completions", &body).json()["choices"][0].clone();
    let tokens: Vec<&str> =
        choice["logprobs"]["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!((tokens.len(), tokens.concat()), (24, choice["text"].as_str().unwrap().to_owned()));
    assert_eq!(choice["logprobs"]["text_offset"][0], 0);
    let mut ids = tokenizer.encode(PROMPT, true).unwrap();
    let begin = ids.len();
    for token in &tokens {
        let id = (0..512).find(|&id| tokenizer.decode(&[id], true).unwrap() == *token);
        ids.push(id.unwrap());
    }
    let expected = logprobs(&tract(), &ids);
    for (at, found) in choice["logprobs"]["token_logprobs"].as_array().unwrap().iter().enumerate() {
        near(found, expected[begin + at - 1][ids[begin + at] as usize]);
    }
    // Streamed, the same lists come in pieces.
    body["stream"] = json!(true);
    let (mut streamed, mut text) = (json!({}), String::new());
    for event in post(address, "/v1/completions", &body).events() {
        let Ok(chunk) = serde_json::from_str::<Value>(&event) else { continue };
        text += chunk["choices"][0]["text"].as_str().unwrap();
        for (field, list) in chunk["choices"][0]["logprobs"].as_object().into_iter().flatten() {
            let all = streamed.as_object_mut().unwrap().entry(field).or_insert(json!([]));
            all.as_array_mut().unwrap().extend(list.as_array().unwrap().iter().cloned());
        }
    }
    assert_eq!((&streamed, &json!(text)), (&choice["logprobs"], &choice["text"]));

    let body = json!({ "model": "chat", "messages": [{ "role": "juliet", "content": "Who?" }], "max_tokens": 9,
        "temperature": 0, "logprobs": true, "top_logprobs": 2 });
    let choice = post(address, "/v1/chat/completions", &body).json()["choices"][0].clone();
    let told = choice["logprobs"]["content"].as_array().unwrap();
    let mut text = Vec::new();
    for token in told {
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        text.extend(bytes);
        // The most probable one was taken.
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"]);
        assert!(token["top_logprobs"][1]["logprob"].as_f64() <= token["logprob"].as_f64());
    }
    assert_eq!((told.len(), json!(String::from_utf8(text).unwrap())), (9, choice["message"]["content"].clone()));
    // Nobody asks.
    let plain = post(address, "/v1/completions", &json!({ "model": "llama", "prompt": PROMPT })).json();
    assert!(plain["choices"][0]["logprobs"].is_null());
    server.stop();
}

#[test]
fn several_prompts_and_texts_share_a_request() {
    let server = start(&["llama", "chat"]);
    let address = server.address();
    let prompts = ["ROMEO:\n", "JULIET:\nO", "The"].map(str::to_owned);
    let expected = generated("llama", &tract(), &prompts, 20);
    let mut body = json!({ "model": "llama", "prompt": prompts, "n": 2, "max_tokens": 20, "temperature": 0 });
    let answer = post(address, "/v1/completions", &body).json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["text"]), (&json!(i), &json!(expected[i / 2])));
    }
    let tokens: usize = prompts.iter().map(|prompt| tokenizer().encode(prompt, true).unwrap().len()).sum();
    assert_eq!(
        answer["usage"],
        json!({ "prompt_tokens": tokens, "completion_tokens": 120, "total_tokens": tokens + 120 })
    );
    // With their prompts, and as a stream.
    (body["stream"], body["echo"], body["stream_options"]) =
        (json!(true), json!(true), json!({ "include_usage": true }));
    let events = post(address, "/v1/completions", &body).events();
    assert_eq!(events.iter().filter(|event| *event == "[DONE]").count(), 1);
    let (mut texts, mut ends) = (vec![String::new(); 6], 0);
    let mut usage = Value::Null;
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        for choice in chunk["choices"].as_array().unwrap() {
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            ends += usize::from(choice["finish_reason"] == "length");
        }
        usage = chunk["usage"].clone();
    }
    assert_eq!((ends, usage), (6, answer["usage"].clone()));
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(*text, prompts[i / 2].clone() + &expected[i / 2]);
    }
    // Texts of a prompt are drawn independently, and a seed gives them again.
    let body = json!({ "model": "chat", "messages": [{ "role": "juliet", "content": "Who?" }], "n": 3, "max_tokens": 20, "seed": 7 });
    let texts = || {
        let answer = post(address, "/v1/chat/completions", &body).json();
        [0, 1, 2].map(|i| answer["choices"][i]["message"]["content"].as_str().unwrap().to_owned())
    };
    let drawn = texts();
    assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2], "{drawn:?}");
    assert_eq!(texts(), drawn);
    server.stop();
}

#[test]
fn what_is_too_much_at_once_is_refused() {
    let server = limited(&["llama", "chat"], |limits| limits.queue = 4);
    let address = server.address();
    for (more, words) in [
        (json!({ "prompt": ["a", "b", "c"], "n": 2 }), "expected 1 to 4 texts at once, found 3 prompts, n = 2"),
        (json!({ "prompt": "a", "n": 0 }), "n: expected at least 1, found 0"),
        (json!({ "prompt": "a", "n": u64::MAX }), "expected 1 to 4 texts at once"),
        (json!({ "prompt": "a", "n": 2, "best_of": 3 }), "best_of: not supported here; expected 1, or n"),
        (json!({ "prompt": "a", "logprobs": 21 }), "logprobs: expected 0 to 20, found 21"),
        (json!({ "prompt": "a", "logprobs": true }), "logprobs: expected 0 to 20, found true"),
        (json!({ "prompt": ["a", ""], "max_tokens": 0, "echo": false }), "max_tokens: expected at least 1"),
        (json!({ "prompt": [[5], [999]] }), "token 999"),
    ] {
        let mut body = json!({ "model": "llama" });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = post(address, "/v1/completions", &body);
        assert!(answer.status == 400, "{}: {}", answer.status, answer.text());
        assert!(answer.text().contains(words), "{words}: {}", answer.text());
    }
    for (more, words) in [
        (json!({ "echo": true }), "echo: not supported"),
        (json!({ "top_logprobs": 2 }), "top_logprobs: not supported here; expected logprobs: true beside it"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs: expected 0 to 20, found 21"),
    ] {
        let mut body = json!({ "model": "chat", "messages": [{ "role": "juliet", "content": "x" }] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = post(address, "/v1/chat/completions", &body);
        assert!(answer.status == 400 && answer.text().contains(words), "{words}: {}", answer.text());
    }
    // As many as can wait.
    let body = json!({ "model": "llama", "prompt": ["a", "b"], "n": 2, "max_tokens": 2 });
    assert_eq!(post(address, "/v1/completions", &body).json()["choices"].as_array().unwrap().len(), 4);
    server.stop();
}

/// Where other servers have it, and without a key.
#[test]
fn health_has_a_page_of_its_own() {
    let server = locked(&["digits"]);
    assert_eq!(get(server.address(), "/health").json(), json!({ "ready": true }));
    server.stop();
}
