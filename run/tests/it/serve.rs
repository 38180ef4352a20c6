//! `moh-run serve`: its start and its end. What it answers is tested in moh-serve.

use crate::models::{counter, write_tokenizer};
use crate::program::{moh_run, refusal, text};
use serde_json::json;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Stdio};

/// Kills the server if a test fails.
struct Server(Child);

impl Server {
    /// Asks it to end, as it does.
    fn end(&mut self) {
        let killed = std::process::Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status().unwrap();
        assert!(killed.success());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server of one model, `counter`, the lines of its log that follow, and its address.
fn started(path: &Path) -> (Server, Lines<BufReader<ChildStderr>>, String) {
    let model = format!("counter={}", text(path));
    let args = ["serve", &model, "--listen", "127.0.0.1:0", "--runtime", "tract", "--json"];
    let mut server = Server(moh_run(&args).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let ready = lines.find_map(|line| {
        let event: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
        (event["message"] == "ready").then(|| event["address"].as_str().unwrap().to_owned())
    });
    (server, lines, ready.unwrap())
}

fn answer(address: &str, page: &str) -> String {
    exchange(address, &format!("GET {page} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
}

fn exchange(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_server_says_where_it_is_and_ends_at_a_signal() {
    let (_folder, path) = counter();
    let (mut server, mut lines, address) = started(&path);
    let answer = answer(&address, "/v2/models/counter");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"input_ids\""), "{answer}");
    server.end();
    assert!(lines.any(|line| line.unwrap().contains("\"ended\"")));
}

/// A stream's answer begins before its text ends: the log has both.
#[test]
fn the_log_tells_how_a_text_ended() {
    let (folder, path) = counter();
    write_tokenizer(folder.path());
    let (mut server, lines, address) = started(&path);
    for stream in [true, false] {
        let body =
            format!(r#"{{"model":"counter","prompt":"abc","max_tokens":4,"ignore_eos":true,"stream":{stream}}}"#);
        let answer = exchange(
            &address,
            &format!(
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {stream}\r\ncontent-length: {}\r\n\
                 connection: close\r\n\r\n{body}",
                body.len()
            ),
        );
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    server.end();
    let events = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
    let ends: Vec<serde_json::Value> =
        events.filter(|event: &serde_json::Value| event["message"] == "the text ended").collect();
    assert_eq!(ends.len(), 2, "{ends:?}");
    for (end, id) in ends.iter().zip(["true", "false"]) {
        assert_eq!((&end["prompt_tokens"], &end["tokens"], &end["finish"]), (&json!(3), &json!(4), &json!("length")));
        assert_eq!(end["span"], json!({ "id": id, "name": "request" }));
    }
}

/// Its log's reader may go, or the disk that the log is on may be full.
#[test]
fn a_server_whose_log_cannot_be_written_answers() {
    let (_folder, path) = counter();
    let (mut server, lines, address) = started(&path);
    drop(lines);
    for _ in 0..3 {
        // What is refused is logged.
        let answer = answer(&address, "/v2/models/nobody");
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    }
    server.end();
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let (_folder, path) = counter();
    let path = text(&path);
    assert!(refusal(&["serve", "nowhere", "--listen", "127.0.0.1:0"]).contains("cannot serve nowhere"));
    assert!(refusal(&["serve", "nowhere", "--listen", "localhost:0"]).contains("cannot serve nowhere"));
    for bad in ["localhost", "8000", ":8000", "127.0.0.1:80000", "127.0.0.1:"] {
        let errors = refusal(&["serve", "nowhere", "--listen", bad]);
        assert!(errors.contains("expected an address and a port, such as 127.0.0.1:8000"), "{errors}");
    }
    assert!(refusal(&["serve", &format!("a b={path}")]).contains("NAME=PATH"));
    assert!(refusal(&["serve", &format!("a={path}"), &format!("a={path}")]).contains("both are called a"));
    let keys = refusal(&["serve", &format!("a={path}"), "--api-key-file", "nowhere/keys"]);
    assert!(keys.contains("nowhere/keys: cannot be read"), "{keys}");
    assert!(refusal(&["serve", path, "--slots", "0"]).contains("expected a whole number from 1 to 1024"));
    for option in [
        "--instances",
        "--slots",
        "--cache-memory",
        "--prefill",
        "--batch",
        "--batch-window",
        "--queue",
        "--max-body",
        "--timeout",
        "--stall",
        "--connections",
        "--shutdown-timeout",
    ] {
        let errors = refusal(&["serve", path, option, "-1"]);
        assert!(errors.starts_with(&format!("error: invalid value '-1' for '{option} ")), "{errors}");
    }
}
