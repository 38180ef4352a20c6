//! Health, metadata, measurements, documentation, and doors that are none.

use crate::client::{get, post, receive, send};
use crate::models::{config, locked, start, tract};
use moh_serve::{Config, ModelSpec, Server};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn the_server_and_its_models_tell_what_they_are() {
    let server = start(&["llama", "digits"]);
    let address = server.address();
    assert_eq!(get(address, "/v2/health/live").json(), json!({ "live": true }));
    assert_eq!(get(address, "/v2/health/ready").json(), json!({ "ready": true }));
    assert_eq!(get(address, "/v2").json()["name"], "moh-run");
    assert_eq!(get(address, "/v2/models/digits/ready").json(), json!({ "name": "digits", "ready": true }));
    assert_eq!(get(address, "/v2/models/nobody/ready").status, 404);
    let digits = get(address, "/v2/models/digits/versions/1").json();
    assert_eq!((&digits["platform"], &digits["versions"]), (&json!("tract_onnx"), &json!(["1"])));
    assert_eq!(
        (&digits["inputs"][0]["name"], &digits["inputs"][0]["shape"]),
        (&json!("pixel_values"), &json!([-1, 3, 64, 64]))
    );
    assert_eq!(digits["outputs"][0]["shape"], json!([-1, 10]));
    let pages = get(address, "/openapi.json").json();
    for (path, method) in [
        ("/v1/completions", "post"),
        ("/v1/chat/completions", "post"),
        ("/v2/models/{model}/infer", "post"),
        ("/v1/models", "get"),
    ] {
        assert!(pages["paths"][path][method].is_object(), "{path}: {pages}");
    }
    assert!(pages["components"]["schemas"].as_object().unwrap().len() > 10);
    // Nothing is asked for here.
    assert!(pages["security"].is_null() && pages["components"]["securitySchemes"].is_null());
    let measurements = get(address, "/metrics").text();
    assert!(measurements.contains("# TYPE moh_requests_total counter"), "{measurements}");
    // They are counted from 0 on.
    assert!(measurements.contains("moh_restarts_total{model=\"digits\"} 0"), "{measurements}");
    assert!(measurements.contains("path=\"/v2/models/{model}/ready\",status=\"404\""), "{measurements}");
    server.stop();
}

/// What generators of clients rely on.
#[test]
fn operations_have_an_id_of_their_own_and_tell_the_parts_of_their_paths() {
    let server = locked(&["digits"]);
    let headers = [("authorization", "Bearer sk-right")];
    let pages = receive(send(server.address(), "GET", "/openapi.json", &headers, b"")).json();
    let mut ids = Vec::new();
    for (path, page) in pages["paths"].as_object().unwrap() {
        for operation in page.as_object().unwrap().values() {
            ids.push(operation["operationId"].as_str().unwrap());
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let told: Vec<&str> = parameters.iter().map(|parameter| parameter["name"].as_str().unwrap()).collect();
            let parts: Vec<&str> =
                path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')).collect();
            assert_eq!(told, parts, "{path}");
            let is_open = path.starts_with("/v2/health/");
            assert_eq!(operation["security"], if is_open { json!([]) } else { json!(null) }, "{path}");
        }
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "{ids:?}");
    assert_eq!(pages["security"], json!([{ "api_key": [] }]));
    assert_eq!(pages["components"]["securitySchemes"]["api_key"], json!({ "type": "http", "scheme": "bearer" }));
    for path in ["/metrics", "/v2/models/{model}/versions/{version}/infer", "/v2/models/{model}/versions/{version}"] {
        assert!(pages["paths"][path].is_object(), "{path}");
    }
    server.stop();
}

#[test]
fn a_server_that_loads_lives_and_is_not_ready() {
    let config = config(&["llama"], tract());
    let server = Server::listen(&config).unwrap();
    let address = server.address();
    assert_eq!(get(address, "/v2/health/live").status, 200);
    let ready = get(address, "/v2/health/ready");
    assert_eq!((ready.status, ready.json()), (503, json!({ "ready": false })));
    let asked = json!({ "model": "llama", "prompt": "ROMEO:\n", "max_tokens": 2 });
    let refused = post(address, "/v1/completions", &asked);
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    assert_eq!(refused.json()["error"]["code"], "loading");
    assert_eq!([get(address, "/v1/models").status, get(address, "/v2/models/llama").status], [503, 503]);
    server.load(&config).unwrap();
    assert_eq!(get(address, "/v2/health/ready").status, 200);
    assert_eq!(post(address, "/v1/completions", &asked).status, 200);
    server.stop();
}

#[test]
fn request_ids_are_the_clients_or_new_ones() {
    let server = start(&["digits"]);
    let id = |given: &str| {
        let answer = receive(send(server.address(), "GET", "/v2", &[("x-request-id", given)], b""));
        answer.header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(id("mine-1"), "mine-1");
    assert_eq!(id(&"x".repeat(500)).len(), 32);
    assert_eq!(get(server.address(), "/nowhere").header("x-request-id").unwrap().len(), 32);
    server.stop();
}

#[test]
fn keys_open_everything_but_probes() {
    let server = locked(&["llama"]);
    let address = server.address();
    let with = |authorization: &str| {
        let headers = [("authorization", authorization)];
        receive(send(address, "GET", "/v1/models", &headers, b"")).status
    };
    assert_eq!((with("Bearer sk-right"), with("bearer sk-right")), (200, 200));
    for wrong in ["", "Bearer", "Bearer ", "Bearer sk-rig", "Bearer sk-right1", "Basic sk-right", "sk-right"] {
        assert_eq!(with(wrong), 401, "{wrong}");
    }
    let refused = get(address, "/v1/models");
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    for page in ["/metrics", "/openapi.json", "/v2", "/v2/models/llama", "/nowhere", "/v2/health/live/"] {
        assert_eq!(get(address, page).status, 401, "{page}");
    }
    assert_eq!(post(address, "/v1/completions", &json!({ "model": "llama", "prompt": "x" })).status, 401);
    assert_eq!((get(address, "/v2/health/live").status, get(address, "/v2/health/ready").status), (200, 200));
    server.stop();
}

#[test]
fn other_doors_are_none() {
    let server = start(&["digits"]);
    let address = server.address();
    let nowhere = get(address, "/v1/nothing");
    assert_eq!((nowhere.status, nowhere.json()["error"]["code"].clone()), (404, json!("not_found")));
    assert!(get(address, "/v2/nothing").json()["error"].as_str().unwrap().contains("/openapi.json"));
    let method = receive(send(address, "DELETE", "/v2/models/digits/infer", &[], b""));
    assert_eq!((method.status, method.header("allow")), (405, Some("POST")));
    // A name that is no text is refused as everything else is.
    for page in ["/v2/models/%FF", "/v2/models/%FF/ready", "/v2/models/digits/versions/%FF"] {
        let named = get(address, page);
        assert_eq!((named.status, named.header("content-type")), (400, Some("application/json")), "{page}");
        assert!(named.json()["error"].as_str().unwrap().contains("Invalid UTF-8"), "{}", named.text());
    }
    let named = post(address, "/v2/models/%FF/infer", &json!({}));
    assert!(named.status == 400 && named.json()["error"].is_string(), "{}", named.text());
    let named = get(address, "/v1/models/%FF");
    assert_eq!((named.status, named.json()["error"]["code"].clone()), (400, json!("invalid_value")));
    // Bytes that are no HTTP, then one more connection.
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET\r\n\r\n",
        &[0; 4096],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\ngarbage garbage garbage garbage",
        b"GET / HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"\r\n\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let long = "a".repeat(1 << 20);
    let mut stream = send(address, "GET", "/v2", &[("x-long", &long)], b"");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/1.1 200"));
    assert_eq!(get(address, "/v2/health/live").status, 200);
    server.stop();
}

#[test]
fn a_server_says_why_it_does_not_start() {
    let refused = |config: &Config| {
        let error = Server::start(config).err().expect("it started");
        let source = std::error::Error::source(&error).map_or(String::new(), |source| format!(": {source}"));
        format!("{error}{source}")
    };
    let running = start(&["digits"]);
    let taken = Config { listen: running.address(), ..config(&["digits"], tract()) };
    assert!(refused(&taken).contains("cannot listen on"), "{}", refused(&taken));
    running.stop();
    let missing = refused(&config(&["nobody"], tract()));
    assert!(missing.contains("cannot serve nobody") && missing.contains("not found"), "{missing}");
    let mut twice = config(&["digits"], tract());
    twice.models.push(ModelSpec { name: "digits".to_owned(), path: "other".into() });
    assert!(refused(&twice).contains("both are called digits"), "{}", refused(&twice));
}
