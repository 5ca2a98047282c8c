//! One session of the benchmark: which measurements, in which order, and what disturbed them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result, ensure};
use nix::time::ClockId;
use serde::Serialize;

use crate::Arguments;
use crate::clock;
use crate::measure::{self, Scale};
use crate::meter::{self, Ticks};
use crate::subject::{Provider, Running, Setup, Subject};
use crate::syscalls;
use crate::table::{Table, Value, median};

/// Makes the requested measurements and prints the table.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut session = Session::new(arguments)?;
    session.measure()?;
    let conditions = session.conditions()?;
    let table = session.table.render(&session.subjects);
    writeln!(io::stdout(), "\n{table}\n{}", conditions.describe())?;
    if let Some(file) = &arguments.json {
        let report = serde_json::json!({ "conditions": conditions, "table": session.table });
        fs::write(file, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("writing `{}`", file.display()))?;
    }
    Ok(())
}

struct Session {
    scale: Scale,
    only: Vec<String>,
    subjects: Vec<Subject>,
    setup: Setup,
    cpus: Vec<usize>,
    table: Table,
    disturbances: Vec<Disturbance>,
}

/// The conditions that tell how far the figures can be trusted.
#[derive(Serialize)]
struct Conditions {
    versions: BTreeMap<&'static str, String>,
    processors: Vec<usize>,
    rounds: usize,
    /// Percent of the processors' time, median and maximum of all measurements.
    used_by_others: [f64; 2],
    stolen_by_hypervisor: [f64; 2],
}

/// The shares of the processors' time that the session did not have during one measurement.
struct Disturbance {
    others: f64,
    stolen: f64,
}

impl Session {
    fn new(arguments: &Arguments) -> Result<Self> {
        let mut subjects = vec![];
        for subject in &arguments.subjects {
            match subject.binary() {
                Ok(_) => subjects.push(*subject),
                Err(missing) => writeln!(io::stderr(), "without {}: {missing}", subject.name())?,
            }
        }
        ensure!(!subjects.is_empty(), "nothing to measure");
        let mut scale = if arguments.quick { Scale::QUICK } else { Scale::FULL };
        scale.rounds = arguments.rounds.unwrap_or(scale.rounds);
        meter::raise_file_limit()?;
        Ok(Self {
            scale,
            only: arguments.only.clone(),
            subjects,
            setup: Setup { workers: arguments.cpus, buffers_requests: arguments.request_buffering },
            cpus: meter::confine(arguments.cpus)?,
            table: Table::default(),
            disturbances: vec![],
        })
    }

    fn measure(&mut self) -> Result<()> {
        let scale = self.scale;
        self.alternate("unary-1", |running| measure::unary_alone(scale, running))?;
        self.table.compare("latency", Subject::Direct);
        self.alternate("unary-16", |running| measure::unary_crowd(scale, running))?;
        self.alternate("prompt", |running| measure::long_prompt(scale, running))?;
        self.alternate("first-byte", |running| measure::first_byte(scale, running))?;
        for pace in scale.paces {
            let name = format!("streams-{}-{:?}", pace.0, pace.1);
            self.alternate(&name, |running| measure::paced(scale, *pace, running))?;
        }
        self.alternate("unpaced", |running| measure::unpaced(scale, running))?;
        self.memory()?;
        self.starts()?;
        self.system_calls()
    }

    /// Starts all subjects and measures one after the other, every round in the other direction.
    fn alternate(
        &mut self,
        name: &str,
        measure: impl Fn(&Running) -> Result<Vec<Value>>,
    ) -> Result<()> {
        if !self.is_asked_for(name)? {
            return Ok(());
        }
        let provider = Provider::start()?;
        let running = self.start_all(&provider)?;
        for round in 0..self.scale.rounds {
            for (subject, running) in in_turn(&running, round) {
                let before = Reading::now(&self.cpus, &provider, running)?;
                let values = measure(running)
                    .with_context(|| format!("measuring `{name}` of {}", subject.name()))?;
                let after = Reading::now(&self.cpus, &provider, running)?;
                self.disturbances.push(after.disturbance(&before));
                self.record(*subject, values);
            }
        }
        Ok(())
    }

    /// Uses a new process each time, because used memory is not returned to the system.
    fn memory(&mut self) -> Result<()> {
        if !self.is_asked_for("memory")? {
            return Ok(());
        }
        let provider = Provider::start()?;
        for _ in 0..self.scale.rounds.min(3) {
            for (subject, running) in self.start_all(&provider)? {
                self.record(subject, measure::memory(self.scale, &running)?);
            }
        }
        Ok(())
    }

    fn starts(&mut self) -> Result<()> {
        if !self.is_asked_for("start")? {
            return Ok(());
        }
        let provider = Provider::start()?;
        for _ in 0..self.scale.starts {
            for subject in self.subjects.clone() {
                self.record(subject, measure::start(subject, &provider, self.setup)?);
            }
        }
        Ok(())
    }

    fn system_calls(&mut self) -> Result<()> {
        if !syscalls::are_countable() || !self.is_asked_for("system-calls")? {
            return Ok(());
        }
        let provider = Provider::start()?;
        for (subject, running) in self.start_all(&provider)? {
            self.record(subject, measure::system_calls(self.scale, &running)?);
        }
        Ok(())
    }

    fn start_all(&self, provider: &Provider) -> Result<Vec<(Subject, Running)>> {
        let start = |subject: &Subject| {
            let running = Running::start(*subject, provider, self.setup)?;
            running.check().with_context(|| format!("checking {}", subject.name()))?;
            Ok((*subject, running))
        };
        self.subjects.iter().map(start).collect()
    }

    fn record(&mut self, subject: Subject, values: Vec<Value>) {
        for value in values {
            self.table.record(subject, value);
        }
    }

    fn is_asked_for(&self, name: &str) -> Result<bool> {
        let asked = self.only.is_empty() || self.only.iter().any(|only| name.contains(only));
        if asked {
            writeln!(io::stderr(), "{name}")?;
        }
        Ok(asked)
    }

    fn conditions(&self) -> Result<Conditions> {
        let share = |of: fn(&Disturbance) -> f64| {
            let shares: Vec<f64> = self.disturbances.iter().map(|one| 100.0 * of(one)).collect();
            [median(&shares), shares.into_iter().fold(0.0, f64::max)]
        };
        let programs = self.subjects.iter().filter(|subject| **subject != Subject::Direct);
        let versions = programs.map(|subject| Ok((subject.name(), subject.version()?)));
        Ok(Conditions {
            versions: versions.collect::<Result<_>>()?,
            processors: self.cpus.clone(),
            rounds: self.scale.rounds,
            used_by_others: share(|one| one.others),
            stolen_by_hypervisor: share(|one| one.stolen),
        })
    }
}

impl Conditions {
    fn describe(&self) -> String {
        let versions: Vec<_> =
            self.versions.iter().map(|(name, of)| format!("{name}: {of}")).collect();
        let ([others, most], [stolen, most_stolen]) =
            (self.used_by_others, self.stolen_by_hypervisor);
        format!(
            "{}. Processors {:?}, {} rounds. During a measurement other programs used {others:.0} % \
             of them (median; at most {most:.0} %), the hypervisor took {stolen:.0} % (at most \
             {most_stolen:.0} %).",
            versions.join(", "),
            self.processors,
            self.rounds,
        )
    }
}

fn in_turn(
    running: &[(Subject, Running)],
    round: usize,
) -> Box<dyn Iterator<Item = &(Subject, Running)> + '_> {
    if round.is_multiple_of(2) { Box::new(running.iter()) } else { Box::new(running.iter().rev()) }
}

/// The clocks of the machine and of all processes of the session.
struct Reading {
    at: u64,
    ticks: Ticks,
    ours: u64,
    cpus: usize,
}

impl Reading {
    fn now(cpus: &[usize], provider: &Provider, running: &Running) -> Result<Self> {
        let client = clock::nanos(ClockId::CLOCK_PROCESS_CPUTIME_ID.now()?);
        Ok(Self {
            at: clock::now(),
            ticks: Ticks::now(cpus)?,
            ours: client + provider.tree().cpu()? + running.tree().cpu()?,
            cpus: cpus.len(),
        })
    }

    fn disturbance(&self, before: &Self) -> Disturbance {
        let (busy, stolen) = self.ticks.since(before.ticks);
        let elapsed = (self.at - before.at) as f64 * self.cpus as f64;
        let ours = (self.ours - before.ours) as f64 / elapsed;
        Disturbance { others: (busy - ours).max(0.0), stolen }
    }
}
