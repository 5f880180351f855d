// Graphs: what is queued between the begin and the end of a capture is kept as a list of things to do, and does not
// happen until the graph is replayed. It is included by accelerator.cpp, within its namespace.
//
// The operators do run while they are captured, since the host has to learn the shapes of their results. What they have
// written is undone at the end: memory that was there before is as it was, and new memory is poison.
//
// As on CUDA, a stream takes part from when it waits for an event of one that does, all of them must have been waited for
// at the end, whatever lets the host know something of the device is refused, and a graph keeps the memory that was
// allocated in its capture, at the same addresses, as long as it lives. Stricter than CUDA: work on a stream that takes
// no part is refused, where CUDA would do it at once and leave it out of the graph.

struct Node {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;
};

struct Graph {
  int64_t number, origin;
  std::set<int64_t> streams;
  std::vector<Node> nodes;
  std::map<int64_t, std::string> before;  // the bytes of each block when the capture began
};

std::map<int64_t, Graph> graphs;
int64_t capturing = 0;  // the graph's number; read it with the lock
int64_t next_graph = 1;
std::atomic<bool> is_capturing = false;

void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(!is_capturing, "simulated device: operation not permitted when stream is capturing: ", what);
}

// Before anything is queued on a stream.
void check_stream_locked(int64_t stream, const std::string& what) {
  if (!capturing) return;
  TORCH_CHECK(graphs[capturing].streams.count(stream), "simulated device: operation not permitted when stream is capturing: ", what,
              " on stream ", stream, ", which no event has forked from the capturing stream ", graphs[capturing].origin);
}

void capture_locked(std::string name, const std::vector<Access>& accesses, std::function<void()> run) {
  if (capturing) graphs[capturing].nodes.push_back({std::move(name), accesses, std::move(run)});
}

// What an event of a capture that is over stands for is in the graph alone.
void check_event(int64_t captured_by) {
  TORCH_CHECK(!captured_by, "simulated device: operation not permitted on an event last recorded in a capturing stream");
}

// A stream waits for an event that was recorded in this capture, or in none.
void fork_locked(int64_t stream, int64_t captured_by) {
  if (!capturing) return check_event(captured_by);
  auto& graph = graphs[capturing];
  if (captured_by == capturing) graph.streams.insert(stream);
  TORCH_CHECK(captured_by == capturing || !graph.streams.count(stream),
              "simulated device: dependency created on uncaptured work in another stream: stream ", stream,
              " is capturing, and waits for an event that was recorded before or elsewhere");
}

bool keeps_block_locked(int64_t graph) { return graph && graphs.count(graph); }

int64_t begin_capture(int64_t stream) {
  Lock lock(mutex);
  TORCH_CHECK(!capturing, "simulated device: there is a capture already");
  TORCH_CHECK(stream != 0, "simulated device: the default stream cannot be captured");
  land_locked([](const LateCopy&) { return true; });  // nothing is under way when a capture begins
  capturing = next_graph++;
  auto& graph = graphs[capturing] = Graph{capturing, stream, {stream}};
  for (auto& [address, block] : blocks)
    if (!block.pinned) graph.before[block.number] = std::string(reinterpret_cast<char*>(address), block.nbytes);
  is_capturing = true;
  return capturing;
}

void undo_locked(Graph& graph) {
  for (auto& [address, block] : blocks) {
    if (block.pinned) continue;  // only the host has written to it
    auto* bytes = reinterpret_cast<char*>(address);
    auto kept = graph.before.find(block.number);
    if (kept != graph.before.end())
      std::memcpy(bytes, kept->second.data(), block.nbytes);
    else if (block.graph == graph.number)
      std::memset(bytes, POISON, block.nbytes);
  }
  graph.before.clear();
}

void end_capture() {
  Lock lock(mutex);
  TORCH_CHECK(capturing, "simulated device: there is no capture to end");
  auto& graph = graphs[capturing];
  capturing = 0;
  is_capturing = false;
  undo_locked(graph);
  log_locked({Kind::SYNC_DEVICE, 0, "the end of a capture", {}});  // nothing of it is under way
  for (auto stream : graph.streams)
    TORCH_CHECK(is_past(clocks[graph.origin], clocks[stream]), "simulated device: capturing stream has unjoined work: nobody waited for stream ", stream);
}

// After an exception: the graph is of no use.
void drop_capture() {
  Lock lock(mutex);
  if (!capturing) return;
  undo_locked(graphs[capturing]);
  log_locked({Kind::SYNC_DEVICE, 0, "the end of a capture", {}});
  capturing = 0;
  is_capturing = false;
}

void replay(int64_t number) {
  std::vector<Node> nodes;
  std::vector<Access> accesses;
  {
    Lock lock(mutex);
    std::set<int64_t> there;
    for (auto& [address, block] : blocks) there.insert(block.number);
    auto stream = current_stream;
    check_stream_locked(stream, "a replay");
    for (auto& node : graphs.at(number).nodes) {
      for (auto& access : node.accesses)
        TORCH_CHECK(there.count(access.block), "simulated device: use after free: a replay of ", node.name, " uses memory that is not the graph's and was freed");
      accesses.insert(accesses.end(), node.accesses.begin(), node.accesses.end());
      nodes.push_back(node);
    }
    prepare_locked(tick_locked(stream), accesses);
    log_locked({Kind::KERNEL, stream, "a graph", std::move(accesses)});
  }
  InKernel running;
  c10::InferenceMode inference;
  for (auto& node : nodes) node.run();
}

void free_graph(int64_t number) {
  std::vector<uintptr_t> dead;
  Lock lock(mutex);
  graphs.erase(number);
  for (auto& [address, block] : blocks)
    if (block.graph == number && block.dead) dead.push_back(address);
  for (auto address : dead) {
    forget_block_locked(address);
    std::free(reinterpret_cast<void*>(address));
  }
}
