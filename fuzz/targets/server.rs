//! Requests to the server, each on a connection of its own; answers with status 500 are findings.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_export::{Options, export};
use moh_fuzz::choices::Choices;
use moh_fuzz::{folder, tract};
use moh_serve::{Config, Limits, ModelSpec, Server};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Pages that take bodies. The rest of a request is the fuzzer's.
const PAGES: [(&str, &str, &str); 9] = [
    ("POST", "/v1/completions", "application/json"),
    ("POST", "/v1/chat/completions", "application/json"),
    ("POST", "/v2/models/digits/infer", "application/json"),
    ("POST", "/v2/models/llama/infer", "application/json"),
    ("POST", "/v2/models/digits/infer", "application/octet-stream"),
    ("POST", "/inference.GRPCInferenceService/ModelInfer", "application/grpc"),
    ("POST", "/inference.GRPCInferenceService/ModelMetadata", "application/grpc"),
    ("GET", "/v2/models/digits", "application/json"),
    ("GET", "/metrics", "text/plain"),
];

fn address() -> SocketAddr {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let start = || {
        let checkpoints = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/checkpoints");
        let model = |name: &str, from: &str| {
            let path = folder().path().join(name).join("model.onnx");
            export(&checkpoints.join(from), &path, &Options { verify: Some(false), ..Options::default() }).unwrap();
            ModelSpec { name: name.to_owned(), path }
        };
        let models = vec![model("llama", "shakespeare-moh-llama"), model("digits", "digits-moh-vit")];
        let (timeout, stall) = (Duration::from_secs(2), Duration::from_secs(5));
        let limits = Limits { timeout, stall, body: 1 << 16, ..Limits::default() };
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        Server::start(&Config { models, listen, runtime: tract(), instances: 1, keys: None, limits }).unwrap()
    };
    SERVER.get_or_init(start).address()
}

fuzz_target!(|bytes: &[u8]| {
    let mut choices = Choices(bytes);
    let page = usize::from(choices.byte()) % (PAGES.len() + 1);
    let request = match PAGES.get(page) {
        Some((method, path, content)) => {
            let body = choices.0;
            // JSON before binary tensors, as the protocol has it.
            let json = if *content == "application/octet-stream" {
                let end = body.iter().rposition(|&byte| byte == b'}').map_or(0, |end| end + 1);
                format!("inference-header-content-length: {end}\r\n")
            } else {
                String::new()
            };
            let frame = if *content == "application/grpc" {
                [&[0][..], &(body.len() as u32).to_be_bytes()].concat()
            } else {
                Vec::new()
            };
            let length = frame.len() + body.len();
            let head = format!(
                "{method} {path} HTTP/1.1\r\nhost: fuzz\r\nconnection: close\r\nte: trailers\r\ncontent-type: {content}\r\n\
                {json}content-length: {length}\r\n\r\n"
            );
            [head.as_bytes(), &frame, body].concat()
        }
        // All of it.
        None => choices.0.to_vec(),
    };
    let mut stream = TcpStream::connect(address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(&request);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer"),
        _ => {}
    }
    assert!(!answer.starts_with(b"HTTP/1.1 500"), "{}", String::from_utf8_lossy(&answer));
});
