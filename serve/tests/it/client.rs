//! A client that hides nothing: HTTP/1.1 on a socket.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than anything takes, so that what hangs fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A response.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The data of a stream's events.
    pub(crate) fn events(&self) -> Vec<String> {
        self.text().lines().filter_map(|line| line.strip_prefix("data: ").map(str::to_owned)).collect()
    }
}

/// A connection on which a request was sent.
pub(crate) fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut head =
        format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
    // A server may refuse it before all of it is sent.
    let _ = stream.write_all(body);
    stream
}

/// All that comes on a connection.
pub(crate) fn receive(stream: TcpStream) -> Response {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{line:?}"));
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_owned(), value.to_owned()));
    }
    let mut body = Vec::new();
    let response = Response { status, headers, body: Vec::new() };
    if response.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap_or_else(|_| panic!("chunk of size {size:?}"));
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).unwrap();
            if size == 0 {
                break;
            }
            body.extend(&chunk[..size]);
        }
    } else {
        reader.read_to_end(&mut body).unwrap();
    }
    Response { body, ..response }
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Response {
    receive(send(address, "GET", path, &[], b""))
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    receive(send(address, "POST", path, &[("content-type", "application/json")], body.to_string().as_bytes()))
}

/// The value of a measurement, the first with these words in its line.
pub(crate) fn measured(address: SocketAddr, words: &[&str]) -> Option<f64> {
    let page = get(address, "/metrics").text();
    let line = page.lines().find(|line| !line.starts_with('#') && words.iter().all(|word| line.contains(word)))?;
    line.rsplit(' ').next()?.parse().ok()
}
