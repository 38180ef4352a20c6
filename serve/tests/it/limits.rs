//! What exceeds a limit is refused, and nobody else notices.

use crate::client::{Response, get, measured, post, receive, send};
use crate::models::{generated, limited, tract};
use serde_json::{Value, json};
use std::io::Read;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// A text that takes long, as a stream.
pub(crate) fn long(model: &str) -> Value {
    json!({ "model": model, "prompt": "ROMEO:\n", "max_tokens": 480, "temperature": 0, "ignore_eos": true, "stream": true })
}

fn short(model: &str) -> Value {
    json!({ "model": model, "prompt": "ROMEO:\n", "max_tokens": 8, "temperature": 0 })
}

/// Waits until a measurement has this value.
pub(crate) fn wait_for(address: SocketAddr, words: &[&str], value: f64) {
    let began = Instant::now();
    while measured(address, words) != Some(value) {
        assert!(began.elapsed() < Duration::from_secs(30), "{words:?}: {:?}, not {value}", measured(address, words));
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A stream that has begun.
pub(crate) fn begun(address: SocketAddr, model: &str) -> std::net::TcpStream {
    let mut stream = send(address, "POST", "/v1/completions", &[], long(model).to_string().as_bytes());
    stream.read_exact(&mut [0; 64]).unwrap();
    stream
}

fn code(answer: &Response) -> Value {
    answer.json()["error"]["code"].clone()
}

/// A model that takes more is not blamed for it.
#[test]
fn a_text_that_the_memory_for_caches_has_no_room_for_is_refused() {
    let server = limited(&["little=llama"], |limits| limits.cache = Some(1 << 20));
    let mut body = short("little");
    body["max_tokens"] = json!(500);
    let answer = post(server.address(), "/v1/completions", &body);
    assert_eq!((answer.status, code(&answer)), (400, json!("context_length_exceeded")));
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("--cache-memory") && !message.contains("the model's"), "{message}");
    assert_eq!(post(server.address(), "/v1/completions", &short("little")).status, 200);
    server.stop();
}

#[test]
fn a_body_that_is_too_large_is_refused_whole_or_in_chunks() {
    let server = limited(&["large=llama"], |limits| limits.body = 10_000);
    let address = server.address();
    let body = vec![b' '; 2_000_000];
    let answer = receive(send(address, "POST", "/v1/completions", &[], &body));
    assert_eq!((answer.status, code(&answer)), (413, json!("request_too_large")));
    let infer = receive(send(address, "POST", "/v2/models/large/infer", &[], &body));
    assert_eq!(infer.status, 413);
    assert!(infer.json()["error"].as_str().unwrap().contains("at most 10000 bytes"));
    // Without a length.
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream
        .write_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        )
        .unwrap();
    for _ in 0..20 {
        let _ = stream.write_all(format!("400\r\n{}\r\n", " ".repeat(1024)).as_bytes());
    }
    let _ = stream.write_all(b"0\r\n\r\n");
    assert_eq!(receive(stream).status, 413);
    assert_eq!(post(address, "/v1/completions", &short("large")).status, 200);
    server.stop();
}

#[test]
fn a_compressed_body_is_refused_by_its_header() {
    let server = limited(&["packed=llama"], |_| ());
    let with = |path: &str, encoding: &str| {
        let body = short("packed").to_string();
        receive(send(server.address(), "POST", path, &[("content-encoding", encoding)], body.as_bytes()))
    };
    let refused = with("/v1/completions", "gzip");
    assert_eq!((refused.status, code(&refused)), (415, json!("unsupported_encoding")));
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("Content-Encoding: expected identity") && message.contains("\"gzip\""), "{message}");
    assert_eq!(with("/v2/models/packed/infer", "deflate").status, 415);
    assert_eq!(with("/v1/completions", "Identity").status, 200);
    server.stop();
}

#[test]
fn a_body_that_does_not_come_is_not_waited_for() {
    let server = limited(&["stalled=llama"], |limits| limits.stall = Duration::from_millis(100));
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(server.address()).unwrap();
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 99\r\n\r\n{")
        .unwrap();
    assert_eq!(receive(stream).status, 408);
    // It comes byte by byte, for longer than a request may take.
    let slow = limited(&["dripping=llama"], |limits| limits.timeout = Duration::from_millis(300));
    let mut stream = std::net::TcpStream::connect(slow.address()).unwrap();
    stream
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 99\r\n\r\n")
        .unwrap();
    let began = std::time::Instant::now();
    for _ in 0..8 {
        let _ = stream.write_all(b" ");
        std::thread::sleep(Duration::from_millis(60));
    }
    let answer = receive(stream);
    assert_eq!((answer.status, code(&answer)), (408, json!("request_timeout")));
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("did not come within the 0.3 s"), "{message}");
    assert!(began.elapsed() < Duration::from_secs(30), "it was waited for until nothing came any more");
    slow.stop();
    // Not even the head comes.
    let mut stream = std::net::TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"POST /v1/comp").unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&rest));
    server.stop();
}

#[test]
fn a_full_queue_refuses_and_tells_when_to_come_again() {
    let server = limited(&["full=llama"], |limits| (limits.slots, limits.queue) = (1, 1));
    let address = server.address();
    let running = begun(address, "full");
    let waiting = send(address, "POST", "/v1/completions", &[], short("full").to_string().as_bytes());
    wait_for(address, &["moh_queue_requests", "full"], 1.0);
    let refused = post(address, "/v1/completions", &short("full"));
    assert_eq!((refused.status, refused.header("retry-after"), code(&refused)), (429, Some("1"), json!("queue_full")));
    // The one that runs goes, and the one that waits gets its turn.
    drop(running);
    let expected = &generated("llama", &tract(), &["ROMEO:\n".to_owned()], 8)[0];
    assert_eq!(receive(waiting).json()["choices"][0]["text"], *expected);
    server.stop();
}

/// A thread that is busy, or waits for the next request, does not see that one has left.
#[test]
fn a_request_whose_client_left_waits_no_more() {
    let server = limited(&["gone=llama"], |limits| limits.slots = 1);
    let address = server.address();
    let _running = begun(address, "gone");
    let waiting = send(address, "POST", "/v1/completions", &[], short("gone").to_string().as_bytes());
    wait_for(address, &["moh_queue_requests", "gone"], 1.0);
    drop(waiting);
    wait_for(address, &["moh_queue_requests", "gone"], 0.0);
    // Those of other tests are counted, too.
    let (began, left) = (Instant::now(), || measured(address, &["moh_requests_total", "/v1/completions", "\"499\""]));
    while left() < Some(1.0) {
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", left());
        std::thread::sleep(Duration::from_millis(2));
    }
    server.stop();
}

#[test]
fn a_disconnect_frees_its_slot_at_once() {
    let server = limited(&["left=llama"], |limits| limits.slots = 1);
    let address = server.address();
    for is_stream in [true, false] {
        let mut body = long("left");
        body["stream"] = json!(is_stream);
        let stream = send(address, "POST", "/v1/completions", &[], body.to_string().as_bytes());
        wait_for(address, &["moh_slots_used", "left"], 1.0);
        let generated = measured(address, &["moh_tokens_total", "left", "generated"]).unwrap();
        drop(stream);
        let answer = post(address, "/v1/completions", &short("left"));
        assert_eq!(answer.status, 200);
        let more = measured(address, &["moh_tokens_total", "left", "generated"]).unwrap() - generated;
        assert!(more < 400.0, "it went on for {more} tokens");
    }
    server.stop();
}

#[test]
fn a_deadline_ends_what_runs_and_what_waits() {
    let server = limited(&["late=llama"], |limits| (limits.slots, limits.timeout) = (1, Duration::from_millis(40)));
    let address = server.address();
    let mut body = long("late");
    body["stream"] = json!(false);
    let running = send(address, "POST", "/v1/completions", &[], body.to_string().as_bytes());
    let ended = receive(running);
    // A fast machine may be done by then: nothing is to be seen there.
    if ended.status != 200 {
        assert_eq!((ended.status, code(&ended)), (504, json!("deadline_exceeded")), "{}", ended.text());
        // A stream has its status already: the error is an event.
        let streamed = post(address, "/v1/completions", &long("late"));
        let events = streamed.events();
        if streamed.status == 200 && !events.iter().any(|event| event.contains("\"length\"")) {
            assert!(events[events.len() - 2].contains("deadline_exceeded"), "{events:?}");
            assert_eq!(events[events.len() - 1], "[DONE]");
        }
        // Nor does it look as if it waited where nothing of it is out: as much as all of it may be a text to stop before.
        let mut held = generated("llama", &tract(), &["ROMEO:\n".to_owned()], 400)[0].clone();
        held.truncate((0..=1000).rev().find(|&end| held.is_char_boundary(end)).unwrap());
        (body["stop"], body["max_tokens"]) = (json!([held + "."]), json!(480));
        let silent = post(address, "/v1/completions", &body);
        assert!(
            silent.status == 200 || (silent.status, code(&silent)) == (504, json!("deadline_exceeded")),
            "{}",
            silent.text()
        );
    }
    server.stop();

    let server = limited(&["queued=llama"], |limits| (limits.slots, limits.timeout) = (1, Duration::from_secs(1)));
    let address = server.address();
    let (mut first, mut second) = (long("queued"), long("queued"));
    (first["max_tokens"], second["max_tokens"]) = (json!(500), json!(500));
    let running: Vec<_> =
        (0..40).map(|_| send(address, "POST", "/v1/completions", &[], first.to_string().as_bytes())).collect();
    let answers: Vec<Response> = running.into_iter().map(receive).collect();
    assert!(answers.iter().all(|answer| [200, 503, 504].contains(&answer.status)));
    if let Some(waited) = answers.iter().find(|answer| answer.status == 503) {
        assert_eq!((waited.header("retry-after"), code(waited)), (Some("5"), json!("overloaded")));
    }
    server.stop();
}

/// More answers than the system keeps for a client that reads none.
#[test]
fn a_client_that_does_not_read_is_dropped() {
    use std::io::Write;
    let server = limited(&["unread=llama"], |limits| limits.stall = Duration::from_millis(300));
    let size = get(server.address(), "/openapi.json").body.len();
    let count = (40 << 20) / size;
    let mut stream = std::net::TcpStream::connect(server.address()).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        // Where the server reads no further, or is gone.
        writer.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
        (0..count).all(|_| writer.write_all(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n").is_ok())
    });
    std::thread::sleep(Duration::from_secs(3));
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let (mut found, mut part) = (0, vec![0; 1 << 20]);
    while let Ok(read @ 1..) = stream.read(&mut part) {
        found += read;
    }
    let _ = sending.join().unwrap();
    assert!(found < count * size, "it was sent all of {found} bytes");
    server.stop();
}

/// Found by the fuzz target `server`: it was held until the time of clients that send nothing was over.
#[test]
fn a_connection_that_ends_while_it_begins_is_dropped_at_once() {
    use std::io::Write;
    let server = limited(&["half=llama"], |limits| limits.stall = Duration::from_secs(60));
    for beginning in [&b"P"[..], b"PRI * HTTP/2.0\r\n"] {
        let mut stream = std::net::TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(beginning).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0; 64]).unwrap(), 0);
    }
    // What comes in pieces is whole.
    let mut stream = std::net::TcpStream::connect(server.address()).unwrap();
    for byte in b"POST /v2/health/live HTTP/1.1\r\nconnection: close\r\nhost: x\r\n\r\n".chunks(1) {
        stream.write_all(byte).unwrap();
        stream.flush().unwrap();
    }
    assert_eq!(receive(stream).status, 405);
}
