//! The end of a server.

use crate::client::get;
use crate::limits::{begun, wait_for};
use crate::models::{limited, start};
use std::net::TcpStream;
use std::time::{Duration, Instant};

#[test]
fn what_runs_is_finished_and_nothing_new_is_taken() {
    let server = start(&["ending=llama"]);
    let address = server.address();
    let running: Vec<TcpStream> = (0..3).map(|_| begun(address, "ending")).collect();
    let readers: Vec<_> = running.into_iter().map(|stream| std::thread::spawn(move || rest(stream))).collect();
    server.stop();
    for reader in readers {
        assert!(reader.join().unwrap().contains("data: [DONE]"));
    }
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn what_does_not_end_in_time_is_given_up() {
    let server = limited(&["endless=llama"], |limits| (limits.shutdown, limits.slots) = (Duration::ZERO, 1));
    let address = server.address();
    let running: Vec<TcpStream> = vec![begun(address, "endless")];
    wait_for(address, &["moh_slots_used", "endless"], 1.0);
    let readers: Vec<_> = running.into_iter().map(|stream| std::thread::spawn(move || rest(stream))).collect();
    let began = Instant::now();
    server.stop();
    assert!(began.elapsed() < Duration::from_secs(20));
    for reader in readers {
        let rest = reader.join().unwrap();
        // It may have come to its end before.
        assert!(rest.contains("shutting_down") || rest.contains("\"length\""), "{rest}");
    }
}

#[test]
fn idle_connections_do_not_keep_a_server() {
    let server = start(&["digits"]);
    let idle = TcpStream::connect(server.address()).unwrap();
    assert_eq!(get(server.address(), "/v2").status, 200);
    let began = Instant::now();
    server.stop();
    assert!(began.elapsed() < Duration::from_secs(20));
    drop(idle);
}

#[test]
fn a_body_that_is_half_sent_does_not_keep_a_server() {
    use std::io::Write;
    let server = start(&["digits"]);
    let half = |head: &str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(format!("{head}\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{").as_bytes()).unwrap();
        stream
    };
    let halves = [
        half("POST /v1/completions HTTP/1.1"),
        half("POST /v2/models/digits/infer HTTP/1.1"),
        half("POST /inference.GRPCInferenceService/ModelInfer HTTP/1.1\r\ncontent-type: application/grpc"),
    ];
    // Long enough that their bodies are waited for, mostly; else they are refused before.
    std::thread::sleep(Duration::from_millis(200));
    let began = Instant::now();
    server.stop();
    assert!(began.elapsed() < Duration::from_secs(20));
    let [completion, infer, grpc] = halves.map(rest);
    for answer in [completion, infer] {
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("shutting down"), "{answer}");
    }
    assert!(grpc.contains("grpc-status: 14"), "{grpc}");
}

fn rest(mut stream: TcpStream) -> String {
    use std::io::Read;
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    String::from_utf8_lossy(&rest).into_owned()
}
