//! Connections: HTTP/1 and HTTP/2 without TLS, each bounded in time.

use crate::config::Limits;
use crate::measure::Connection;
use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_io_timeout::TimeoutStream;

/// After the system could not accept a connection, as where there are too many open files.
const PAUSE: Duration = Duration::from_millis(100);
/// How HTTP/2 begins.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);
/// Header fields of a request together.
const HEADERS: u32 = 64 << 10;
/// Requests at a time on one HTTP/2 connection.
const STREAMS: u32 = 256;

/// Serves connections until `stopped`; returns when the last one is done.
pub(super) async fn serve(listener: TcpListener, router: Router, limits: Limits, mut stopped: watch::Receiver<bool>) {
    let builder = Arc::new(builder(&limits));
    let (graceful, room) = (GracefulShutdown::new(), Arc::new(Semaphore::new(limits.connections.max(1))));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &room) => accepted,
            _ = stopped.changed() => break,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        // Tokens go out as they come.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let (builder, watcher, mut stopped) = (builder.clone(), graceful.watcher(), stopped.clone());
        tokio::spawn(async move {
            let (_permit, _counted) = (permit, Connection::new());
            let begun = tokio::select! {
                begun = tokio::time::timeout(limits.stall, begins(&stream)) => begun.unwrap_or(false),
                _ = stopped.changed() => false,
            };
            if !begun {
                return;
            }
            let mut stream = TimeoutStream::new(stream);
            // A client that does not read what was sent to it; one that sends nothing may be waiting for a long answer.
            stream.set_write_timeout(Some(limits.stall));
            let connection = builder.serve_connection(TokioIo::new(Box::pin(stream)), service);
            if let Err(error) = watcher.watch(connection).await {
                tracing::debug!("connection: {error}");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

type Accepted = (TcpStream, tokio::sync::OwnedSemaphorePermit);

/// The next connection, as soon as there is room for one; others wait with the system.
async fn accept(listener: &TcpListener, room: &Arc<Semaphore>) -> std::io::Result<Accepted> {
    let permit = room.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    Ok((listener.accept().await?.0, permit))
}

/// Waits until a client has sent enough to tell HTTP/1 from HTTP/2, for which the builder would wait forever; `false`: it is gone.
async fn begins(stream: &TcpStream) -> bool {
    let mut head = [0; PREFACE.len()];
    loop {
        match stream.peek(&mut head).await {
            Ok(0) | Err(_) => return false,
            Ok(read) if read == head.len() || !PREFACE.starts_with(&head[..read]) => return true,
            // What is there already is readable at once: nothing wakes us for the next byte.
            Ok(_) => tokio::time::sleep(BETWEEN_LOOKS).await,
        }
    }
}

fn builder(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.stall);
    let mut http2 = builder.http2();
    http2.timer(TokioTimer::new()).max_header_list_size(HEADERS).max_concurrent_streams(STREAMS);
    // A peer that is gone without a word is noticed.
    http2.keep_alive_interval(limits.stall).keep_alive_timeout(limits.stall);
    builder
}
