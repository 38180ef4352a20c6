//! `moh-run serve`: its start and its end. What it answers is tested in moh-serve.

use crate::models::counter;
use crate::program::{moh_run, refusal, text};
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
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("GET {page} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).unwrap();
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
