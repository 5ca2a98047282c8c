//! A stand-in for LiteLLM's spend logs, with the answers of a real one.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::service::billing::litellm::{LitellmClient, LitellmConfig};
use serde_json::{Value, json};

use super::{read_recording, time_at};

/// A server that answers as LiteLLM does, on its own port, as long as the test runs.
pub(super) struct ScriptedLitellm {
    pub(super) address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone)]
pub(super) enum LitellmScript {
    /// The answers of a version with pages.
    Pages,
    /// The answers of a version without pages.
    Days,
    Rows(Vec<Value>),
    /// These rows, in answers of a version without pages.
    DaysOf(Vec<Value>),
    Says(u16, &'static str),
}

impl ScriptedLitellm {
    pub(super) fn start(kind: LitellmScript) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests: Arc<Mutex<Vec<String>>> = Arc::default();
        let seen = Arc::clone(&requests);
        thread::spawn(move || {
            for connection in listener.incoming() {
                answer_request(connection.unwrap(), &kind, &seen);
            }
        });
        Self { address, asked: requests }
    }

    /// Returns the requested paths.
    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn answer_request(mut connection: TcpStream, kind: &LitellmScript, seen: &Mutex<Vec<String>>) {
    let mut head = vec![];
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && connection.read(&mut byte).is_ok_and(|length| length == 1)
    {
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let Some(path) = head.split(' ').nth(1) else { return };
    assert!(head.contains("authorization: Bearer sk-admin"), "{head}");
    seen.lock().unwrap().push(path.to_owned());
    let (status, body) = match kind {
        LitellmScript::Says(status, body) => (*status, body.as_bytes().to_vec()),
        LitellmScript::Pages => (200, read_recording("spend_logs_v2.json")),
        LitellmScript::Days | LitellmScript::DaysOf(_) if path.starts_with("/spend/logs/v2") => {
            (404, b"{\"detail\":\"Not Found\"}".to_vec())
        }
        LitellmScript::Days => (200, read_recording("spend_logs.json")),
        LitellmScript::Rows(rows) => (200, format_page(rows, path)),
        LitellmScript::DaysOf(rows) => (200, json!(rows).to_string().into_bytes()),
    };
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status} -\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    let _left = connection.write_all(&[head.into_bytes(), body].concat());
}

fn format_page(rows: &[Value], path: &str) -> Vec<u8> {
    let of = |name: &str| {
        let start = path.find(name)? + name.len();
        path[start..].split('&').next()
    };
    let number = |name: &str| of(name).unwrap().parse::<usize>().unwrap();
    let (page, size) = (number("&page="), number("&page_size="));
    let is_of = |row: &Value, id: &str| row["request_id"] == id || row["litellm_call_id"] == id;
    let wanted: Vec<_> = rows
        .iter()
        .filter(|_| !path.contains("end_user="))
        .filter(|row| of("&request_id=").is_none_or(|id| is_of(row, id)))
        .skip((page - 1) * size)
        .take(size)
        .collect();
    json!({ "data": wanted, "total": rows.len(), "page": page, "page_size": size })
        .to_string()
        .into_bytes()
}

pub(super) fn litellm_client(address: SocketAddr) -> LitellmClient {
    let url = address.to_string().parse().unwrap();
    LitellmClient::new(LitellmConfig { url, key: SecretString::new("sk-admin"), ca_file: None })
        .unwrap()
}

pub(super) fn spend_row(id: &str, run: &str) -> Value {
    let metadata = if run.is_empty() {
        json!({})
    } else {
        json!({ "spend_logs_metadata": { "run_id": run } })
    };
    let mut row = row_at(id, time_at("09:30:53"));
    row["metadata"] = metadata;
    row
}

pub(super) fn row_at(id: &str, time: std::time::SystemTime) -> Value {
    let time = cogni_gateway::base::timestamp::format_rfc3339_millis(time).to_string();
    json!({
        "request_id": format!("chatcmpl-{id}"), "litellm_call_id": id, "status": "success", "spend": 2.5e-5,
        "prompt_tokens": 11, "completion_tokens": 7, "startTime": time, "endTime": time, "end_user": "acct-42",
        "model_group": "gpt", "metadata": { "spend_logs_metadata": { "run_id": "run-7" } },
    })
}
